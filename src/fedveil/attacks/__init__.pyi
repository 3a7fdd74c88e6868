"""The registered attacks, written by `make stubs`."""

from fedveil.attacks.dlg import DLG as DLG
from fedveil.attacks.idlg import IDLG as IDLG
from fedveil.attacks.inverting_gradients import InvertingGradients as InvertingGradients
