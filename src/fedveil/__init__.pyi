"""The public names and where they live: the one list, for type checkers and for `fedveil/__init__.py`."""

from fedveil import attacks as attacks
from fedveil import defenses as defenses
from fedveil.auditing.captures import attack as attack
from fedveil.auditing.experiment import Experiment as Experiment
from fedveil.auditing.run import audit as audit
from fedveil.auditing.settings import AuditSettings as AuditSettings
from fedveil.defenses.chain import Chain as Chain
from fedveil.defenses.poisson import poisson_loader as poisson_loader
from fedveil.errors import FedveilError as FedveilError
from fedveil.federation.capture import capture as capture
from fedveil.federation.run import federate as federate
from fedveil.federation.settings import FederationSettings as FederationSettings
from fedveil.guard.guard import Guard as Guard
from fedveil.study.compare import compare as compare
from fedveil.tasks.columns import Column as Column
from fedveil.tasks.normalization import Normalization as Normalization
from fedveil.tasks.task import Task as Task
from fedveil.tasks.task import task as task
from fedveil.version import __version__ as __version__
from fedveil.vetting.received import inspect_model as inspect_model
