"""The public names and where they live: the one list, for type checkers and for `fedveil/__init__.py`."""

from fedveil import attacks as attacks
from fedveil import defenses as defenses
from fedveil.auditing.run import audit as audit
from fedveil.auditing.settings import AuditSettings as AuditSettings
from fedveil.defenses.chain import Chain as Chain
from fedveil.defenses.clip import Clip as Clip
from fedveil.defenses.dp_clip import DPClip as DPClip
from fedveil.defenses.dp_gaussian import DPGaussian as DPGaussian
from fedveil.defenses.dp_laplace import DPLaplace as DPLaplace
from fedveil.defenses.dp_sgd import DPSGD as DPSGD
from fedveil.defenses.duchi import Duchi as Duchi
from fedveil.defenses.fedbarre import FedBARRE as FedBARRE
from fedveil.defenses.fedcrap import FedCRAP as FedCRAP
from fedveil.defenses.fedem import FedEM as FedEM
from fedveil.defenses.gradient_dropout import GradientDropout as GradientDropout
from fedveil.defenses.guard import Guard as Guard
from fedveil.defenses.ldp_fl import LDPFL as LDPFL
from fedveil.defenses.ldpm import LDPM as LDPM
from fedveil.defenses.masking import GradientMasking as GradientMasking
from fedveil.defenses.noise import GaussianNoise as GaussianNoise, LaplaceNoise as LaplaceNoise
from fedveil.defenses.noise_add import NoiseAdd as NoiseAdd
from fedveil.defenses.none import NoDefense as NoDefense
from fedveil.defenses.piecewise import PM as PM
from fedveil.defenses.pnpm import PNPM as PNPM
from fedveil.defenses.poisson import poisson_loader as poisson_loader
from fedveil.errors import FedveilError as FedveilError
from fedveil.federation.run import federate as federate
from fedveil.federation.settings import Federation as Federation, FederationSettings as FederationSettings
from fedveil.guard.guard import Guard as Guard
from fedveil.memory import keep_freed_memory as keep_freed_memory
from fedveil.tasks.normalization import Normalization as Normalization
from fedveil.tasks.task import Task as Task
from fedveil.tasks.task import task as task
from fedveil.version import __version__ as __version__
