"""The registered attacks, written by `make stubs`."""

from fedveil.attacks.analytic import Analytic as Analytic
from fedveil.attacks.cinet import CINet as CINet
from fedveil.attacks.dlg import DLG as DLG
from fedveil.attacks.dlg_text import DLGText as DLGText
from fedveil.attacks.fedmia import FedMIA as FedMIA
from fedveil.attacks.gias import GIAS as GIAS
from fedveil.attacks.grad_inversion import GradInversion as GradInversion
from fedveil.attacks.idlg import IDLG as IDLG
from fedveil.attacks.inverting_gradients import InvertingGradients as InvertingGradients
from fedveil.attacks.lamp import LAMP as LAMP
from fedveil.attacks.latent_start import LatentStart as LatentStart
from fedveil.attacks.learned_linear import LearnedLinear as LearnedLinear
from fedveil.attacks.link import LinkTest as LinkTest
from fedveil.attacks.lira import LiRA as LiRA
from fedveil.attacks.loss_threshold import LossThreshold as LossThreshold
from fedveil.attacks.lti import LTI as LTI
from fedveil.attacks.mjolnir import Mjolnir as Mjolnir
from fedveil.attacks.tag import TAG as TAG
from fedveil.attacks.token_rows import TokenRows as TokenRows
from fedveil.attacks.token_span import TokenSpan as TokenSpan
from fedveil.attacks.update_alignment import UpdateAlignment as UpdateAlignment
