"""The registered attacks, written by `make stubs`."""

from fedveil.attacks.analytic import Analytic as Analytic
from fedveil.attacks.dlg import DLG as DLG
from fedveil.attacks.gias import GIAS as GIAS
from fedveil.attacks.idlg import IDLG as IDLG
from fedveil.attacks.inverting_gradients import InvertingGradients as InvertingGradients
from fedveil.attacks.latent_start import LatentStart as LatentStart
from fedveil.attacks.learned_linear import LearnedLinear as LearnedLinear
from fedveil.attacks.link import LinkTest as LinkTest
