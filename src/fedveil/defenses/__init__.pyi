"""The registered defenses, written by `make stubs`."""

from fedveil.defenses.cdp import CDP as CDP
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
from fedveil.defenses.ldp_fl import LDPFL as LDPFL
from fedveil.defenses.ldpm import LDPM as LDPM
from fedveil.defenses.masking import GradientMasking as GradientMasking
from fedveil.defenses.noise import GaussianNoise as GaussianNoise
from fedveil.defenses.noise import LaplaceNoise as LaplaceNoise
from fedveil.defenses.noise_add import NoiseAdd as NoiseAdd
from fedveil.defenses.none import NoDefense as NoDefense
from fedveil.defenses.piecewise import PM as PM
from fedveil.defenses.pnpm import PNPM as PNPM
from fedveil.defenses.ppfa import PPFA as PPFA
from fedveil.defenses.pruning import GradientPruning as GradientPruning
from fedveil.defenses.sign import SignCompression as SignCompression
from fedveil.defenses.soteria import Soteria as Soteria
from fedveil.defenses.spm import SPM as SPM
