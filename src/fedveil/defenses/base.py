"""The extension point: a defense acts at one place on the way from a client's data to its update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import get_annotations
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedveil.clients.batch import ClientBatch, StepResult
from fedveil.defenses.guarantee import NO_GUARANTEE, Exposure, Guarantee
from fedveil.errors import FedveilError
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs
from fedveil.tree import Tree

Place = Literal["sample", "data", "gradient", "upload", "server"]  # chains run in this order
PLACES: tuple[Place, ...] = ("sample", "data", "gradient", "upload", "server")
MessageKind = Literal["gradient", "weights", "delta"]  # what a message carries


@dataclass(frozen=True)
class Strength:
    """The one field that a sweep over a defense's strength moves, and the direction in which it protects more.

    A sweep goes from `weak`, which hardly costs anything, to `strong`, beyond which little is left of the update, in
    even steps of the value, of its logarithm or, for a share close to 1, of the logarithm of what is missing to 1.
    Without both ends there is nothing to sweep: the defense is compared as it is.

    >>> Strength("sigma", "up", weak=0.01, strong=1.0).values(3)
    [0.01, 0.1, 1.0]
    >>> Strength("keep", "down", weak=0.9, strong=0.1, steps="even").values(2)
    [0.9, 0.1]
    >>> Strength("prune", "up", weak=0.9, strong=0.999, steps="rest").values(3)
    [0.9, 0.99, 0.999]
    """

    field: str
    stronger: Literal["up", "down"]
    weak: float | None = None
    strong: float | None = None
    steps: Literal["log", "even", "rest"] = "log"

    def values(self, count: int) -> list[float]:
        """So many values from weak to strong, rounded to three digits; of one, the middle."""
        if self.weak is None or self.strong is None:
            return []
        shares = [0.5] if count == 1 else [place / (count - 1) for place in range(count)]
        return [self._at(self.weak, self.strong, share) for share in shares]

    def _at(self, weak: float, strong: float, share: float) -> float:
        if share in (0, 1):
            return strong if share else weak
        if self.steps == "even":
            return float(f"{weak + share * (strong - weak):.3g}")
        if self.steps == "log":
            return float(f"{weak ** (1 - share) * strong**share:.3g}")
        return 1 - float(f"{(1 - weak) ** (1 - share) * (1 - strong) ** share:.3g}")


@dataclass(frozen=True)
class Facts:
    """What every attacker knows besides the update: the public settings of the run."""

    kind: MessageKind = "gradient"
    batch_size: int = 1
    steps: int = 1  # local steps behind one update
    lr: float = 0.1
    momentum: float = 0.0  # of the local steps
    before: Tree | None = field(default=None, compare=False)  # the weights that the server sent, stacked as the updates

    @property
    def step_scale(self) -> float:
        """What a change of weights is divided by to give the gradient that it stands for."""
        return 1.0 if self.kind == "gradient" else step_weight((self.lr,) * self.steps, self.momentum)

    def in_target(self, place: Place) -> float | None:
        """By how much what is added at a place shows in the gradient that an update stands for; None: not by a factor.

        What every one of several local steps adds is turned about by the later ones.
        """
        if place == "upload":
            return 1 / self.step_scale
        return 1.0 if self.kind == "gradient" or self.steps == 1 else None


def step_weight(lr: Sequence[float], momentum: float) -> float:
    """By how much a constant gradient of 1 moves a weight over local steps of these rates."""
    total = velocity = 0.0
    for rate in lr:
        velocity = momentum * velocity + 1
        total += rate * velocity
    return total


@dataclass(frozen=True, eq=False)
class OwnModels:
    """Models that K clients keep for themselves. A question is answered by one of them, drawn by their shares."""

    name: str  # "randomized ensemble"
    members: tuple[Tree, ...]  # the weights of each
    share: Tensor  # (K, M): how often each answers


@dataclass(frozen=True)
class StepsBefore:
    """Local steps on the same batch before the shared gradient was taken: it is not the gradient at w."""

    steps: int
    lr: float


Reweight = Callable[[Tree, Tree], Tree]  # (target, a candidate's own update) -> trust in each entry
# (what each of several messages says, a candidate's own update) -> what they say together, and the trust in each entry
Rejoin = Callable[[Sequence[Tree], Tree], tuple[Tree, Tree]]


@dataclass(frozen=True)
class Knowledge:
    """What an attacker who knows the defense matches in place of the raw update.

    `target` is an estimate of the true update, `weight` the trust in each entry (0 leaves it out). They are inputs
    of one compiled attack, so the naive and the adaptive attacker, the floor and the ceiling all share it.
    """

    target: Tree
    weight: Tree
    # For defenses that hide which entries are right: the trust in each entry, given the target and what a candidate for
    # the inputs would have sent (methods that alternate between the two get further than any first guess).
    reweight: Reweight | None = None
    # For defenses that perturb the data: how far, in the model's input space, an entry of the inputs may have been
    # moved. The attacker looks for what the gradient was taken at, and then for what the defense made that of.
    reach: float = 0.0
    # And how long the move of all entries of an example is, where it spreads over them about evenly: the length that it
    # would have if it spread over all. Inf where that is not known.
    length: float = math.inf
    # For defenses that move the weights first: what may have happened. An attacker tries each; keeps the lowest cost.
    before: tuple[StepsBefore, ...] = ()
    # For defenses that add noise: its variance on every entry of the target.
    noise: Tree | None = None
    # For defenses that bound the update: the norm that the target has without noise, inf if that is not known. Its
    # direction is right in either case.
    bound: float | None = None
    # For defenses that send signs: whether these are all that is right of the target. One of weight w was turned with
    # the chance (1 − w)/2.
    signs: bool = False
    # Where several messages about each batch were seen and there is a `reweight`: what each of them says, and how they
    # are put together anew, given a candidate. It then acts in the place of `reweight`.
    views: tuple[Tree, ...] = ()
    rejoin: Rejoin | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """What `protect` gets beside the update, for K clients: random streams, its own memory, and by default no data.

    A deployment that has nothing but an update makes its own: `Call(Streams.secure([client]))`.
    """

    streams: Streams
    state: dict[str, Tensor] = field(default_factory=dict)  # the defense's own, kept between calls: change it in place
    batch: ClientBatch | None = None  # the step's data and model, for a defense that has "batch" in its `needs`

    def require_batch(self, name: str, instead: str = "use a defense that needs no batch") -> ClientBatch:
        """The batch, or one line that names the defense which cannot do without it."""
        if self.batch is None:
            raise FedveilError(f"{name} looks at the client's batch, and here is only an update: {instead}")
        return self.batch


def trusting(observed: Tree, *, variance: float | None = None, bound: float | None = None) -> Knowledge:
    """The knowledge of an attacker who takes an update as it is and trusts every entry alike.

    variance: of the noise on every entry, if there is some and it is known.
    bound: see `Knowledge`.
    """
    weight = observed.map(lambda tensor: tensor.new_ones(()).expand_as(tensor))
    noise = observed.map(lambda tensor: tensor.new_tensor(variance).expand_as(tensor)) if variance else None
    return Knowledge(target=observed, weight=weight, noise=noise, bound=bound)


def undo(defense: Defense, known: Knowledge, facts: Facts) -> Knowledge:
    """What is known before a defense acted, given what is known of what it sent."""
    step = defense.knowledge(known.target, facts)
    return replace(
        known,
        target=step.target,
        weight=step.weight.combine(known.weight, torch.mul),
        reweight=step.reweight or known.reweight,
        reach=step.reach + known.reach,
        length=sum(each.length for each in (step, known) if each.reach) or math.inf,
        before=step.before + known.before,
        noise=known.noise if step.noise is None else step.noise,
        bound=known.bound if step.bound is None else step.bound,
        signs=known.signs or (step.signs and known.noise is None),  # noise that came later turns signs, too
    )


def combined(known: Sequence[Knowledge]) -> Knowledge:
    """What several messages about the same batch say together, each with random numbers of its own.

    The mean of their targets, entry by entry weighted by the trust in each; the trust in that is the mean of theirs.
    Noise averages out. Where trust is estimated anew, an entry is right if it is right in any of the messages.
    """
    first, targets = known[0], tuple(each.target for each in known)
    target, weight = _weighted(targets, [each.weight for each in known])
    reweight = first.reweight

    def rejoin(views: Sequence[Tree], made: Tree) -> tuple[Tree, Tree]:
        assert reweight is not None
        trusts = [reweight(view, made) for view in views]
        wrong = trusts[0].map(lambda tensor: 1 - tensor)
        for trust in trusts[1:]:
            wrong = wrong.combine(trust, lambda left, tensor: left * (1 - tensor))
        return _weighted(views, trusts)[0], wrong.map(lambda tensor: 1 - tensor)

    noise = None if first.noise is None else first.noise.map(lambda variance: variance / len(known))
    together = replace(first, target=target, weight=weight, noise=noise)
    return together if reweight is None else replace(together, views=targets, rejoin=rejoin)


def once_as_sent(defense: Defense, views: Sequence[Knowledge], facts: Facts) -> bool:
    """Whether messages are what a defense sent, itself: it acted once, and nothing acted behind it (`trusting`)."""
    once = facts.steps == 1 or defense.acts_at == "upload"
    return once and not any(any(tensor.stride()) for each in views for tensor in each.weight.values())


def mean_tree(trees: Sequence[Tree]) -> Tree:
    """The mean of some trees, added up in their order."""
    total = trees[0]
    for tree in trees[1:]:
        total = total + tree
    return total / len(trees)


def _weighted(targets: Sequence[Tree], weights: Sequence[Tree]) -> tuple[Tree, Tree]:
    """The weighted mean of every entry, the plain one where nothing is trusted, and the mean of the weights."""
    weight = mean_tree(weights)
    products = [target.combine(own, torch.mul) for target, own in zip(targets, weights, strict=True)]
    plain, shared = mean_tree(targets), mean_tree(products)
    mean = {
        name: torch.where(trust > 0, shared[name] / trust.clamp_min(torch.finfo(trust.dtype).tiny), plain[name])
        for name, trust in weight.items()
    }
    return Tree(mean), weight


class Defense:
    """Base of all defenses: a declared class that overrides the hooks of its place.

    A data defense overrides `perturb`, a gradient or upload defense `protect`; one that must own the whole step
    overrides `gradient`; a server-side one `aggregate`. All tensors are stacked: their first axis is the client.
    """

    name: ClassVar[str] = "defense"  # set by the registry
    place: ClassVar[Place] = "gradient"
    of: ClassVar[tuple[MessageKind, ...]] = ("gradient", "weights", "delta")  # which messages it can protect
    state_scope: ClassVar[Literal["round", "run"]] = "round"
    # "batch" (`protect` looks at data or model), "validation", "linear layer", ...; a property where fields decide
    needs: ClassVar[frozenset[str]] = frozenset()
    validation_examples: int = 64  # the most of its own that a client validates on; a field of those that need it
    paper: ClassVar[str] = ""
    promises: ClassVar[str] = "nothing formal"  # in a few words, for lists; `guarantee` has the sentence
    strength: ClassVar[Strength | None] = None
    random_sizes: ClassVar[bool] = False  # `sample` draws batches of random size; for an empty one, noise is shared
    weaknesses: ClassVar[tuple[str, ...]] = ()
    # Whether the best that an attacker who knows this defense can do is to match an update as it is. A defense that
    # neither says so nor overrides `knowledge` counts as never attacked by one who knows it: see `states_knowledge`.
    matched_as_it_is: ClassVar[bool] = False

    @property
    def acts_at(self) -> Place:
        """Where this instance acts; a defense with a field `at` lets the user choose."""
        return getattr(self, "at", self.place)

    @property
    def reads_data(self) -> bool:
        """Whether it may look at the data or the model: if so, it may undo an earlier defense's guarantee."""
        return bool(self.needs & {"batch", "validation"}) or owns_step(self) or perturbs(self)

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Refuse a model that this defense cannot protect, given its trained parameters, before any long work."""

    def sample(self, labels: Tensor, size: int, streams: Streams) -> Tensor | None:
        """Choose the examples of a batch by their labels; None leaves the choice to the protocol. At any place."""
        return None

    def perturb(self, batch: ClientBatch) -> Inputs:
        """Change the inputs before the gradient is taken."""
        return batch.inputs

    def moves(self, batch: ClientBatch) -> Inputs:
        """Where, to first order, the shared gradient is taken: what an attacker who inverts it exactly would see.

        The attacker asks this of candidates, and has none of the client's other data.
        """
        return self.perturb(batch)

    def gradient(self, batch: ClientBatch) -> StepResult:
        """The whole step, for a defense that must own it. At most one in a chain."""
        return batch.share()

    def own_models(self, batch: ClientBatch) -> OwnModels | None:
        """The models that clients keep for themselves at such a step, if the defense trains any: for their utility."""
        return None

    def protect(self, update: Tree, call: Call) -> Tree:
        """Change the gradient of a step, or the update before upload."""
        return update

    def aggregate(self, updates: Tree, weights: Tensor, streams: Streams) -> Tree:
        """Change the updates on a trusted server, before their mean is taken."""
        return updates

    def guarantee(self, exposure: Exposure) -> Guarantee:
        """What is promised over a run."""
        return NO_GUARANTEE

    def knowledge(self, observed: Tree, facts: Facts) -> Knowledge:
        """What an attacker who knows this defense and its settings makes of an observed update."""
        return trusting(observed)

    def together(self, views: Sequence[Knowledge], facts: Facts) -> Knowledge:
        """The same of several messages about the same batch, each with random numbers of its own.

        views: of each message, what the defenses behind this one leave of it: see `once_as_sent`.
        """
        return combined([undo(self, each, facts) for each in views])

    def measures(self, update: Tree) -> dict[str, float]:
        """Predicted effects on a true update, for the report: plain names and numbers."""
        return {}

    # ---- the law of what is sent ---------------------------------------------------------------------------

    @property
    def random(self) -> bool:
        """Whether what it sends does not follow from what comes in: mostly since it draws numbers, at these settings.

        What does follow is replayed by an attacker who tells candidates apart; what does not needs a `log_density`.
        """
        return True

    def resent(self, given: Tree, facts: Facts, streams: Streams) -> Tree:
        """What the same mechanism sends of what came in to be protected, drawing from other streams."""
        return self.protect(given, Call(streams))

    def log_density(self, observed: Tree, given: Tree, facts: Facts) -> Tensor | None:
        """The log density of what was sent, given what came in to be protected: one number per row, shape (K,).

        Up to what is the same for every candidate. None where there is no closed form. What comes in to a `SummedStep`
        is the mean over the examples of a step, as it would go out without noise.
        """
        return None


class SummedStep(Defense):
    """A defense that owns the step as a sum over examples, released once: micro-batches of the step add up."""

    def total(self, batch: ClientBatch) -> StepResult:
        """The sum over the examples of a batch, in `update`. It must not go out as it is."""
        raise NotImplementedError  # every subclass defines its own

    def release(self, total: Tree, batch: ClientBatch) -> Tree:
        """What goes out for the sum over all examples of a step."""
        raise NotImplementedError  # every subclass defines its own

    def gradient(self, batch: ClientBatch) -> StepResult:
        """The sum over one batch, released."""
        shared = self.total(batch)
        return replace(shared, update=self.release(shared.update, batch))


def require_declared(thing: object) -> None:
    """Refuse what is not a defense, and a defense that is not declared: nothing would check or name its fields."""
    if not isinstance(thing, Defense):
        hint = f": write {thing.__name__}()" if isinstance(thing, type) and issubclass(thing, Defense) else ""
        raise FedveilError(f"{thing!r} is not a defense{hint}")
    known = getattr(thing, "__dataclass_fields__", None)
    own = [name for name, kind in get_annotations(type(thing)).items() if "ClassVar" not in str(kind)]
    if known is None or not set(own) <= set(known):
        name = type(thing).__name__
        raise FedveilError(f"the class {name} is not declared: put @declared (of fedveil.fields) right above it")


def owns_step(defense: Defense) -> bool:
    """Whether a defense overrides the whole step."""
    return type(defense).gradient is not Defense.gradient


def perturbs(defense: Defense) -> bool:
    """Whether a defense changes the inputs."""
    return type(defense).perturb is not Defense.perturb


def keeps_models(defense: Defense) -> bool:
    """Whether a defense trains models that clients keep for themselves."""
    return type(defense).own_models is not Defense.own_models


def states_knowledge(defense: Defense) -> bool:
    """Whether a defense says what an attacker who knows it would do. If not, no informed attacker can be tried."""
    return defense.matched_as_it_is or type(defense).knowledge is not Defense.knowledge


def has_density(defense: Defense) -> bool:
    """Whether a defense states the law of what it sends."""
    return type(defense).log_density is not Defense.log_density


def chooses_batch(defense: Defense) -> bool:
    """Whether a defense chooses the examples of a batch."""
    return type(defense).sample is not Defense.sample
