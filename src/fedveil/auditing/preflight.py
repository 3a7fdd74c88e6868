"""Checks of captured updates before they are attacked: what makes attacks fail silently, each told in one line.

Some show in the update alone. With what was behind it, the update is computed again and compared, which tells more.
Under a defense an update differs from the plain one anyway: there only the former are made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fedveil.clients.engine import Loss, Tensors
from fedveil.defenses.chain import Chain
from fedveil.federation.capture import Capture, pseudo_gradient
from fedveil.tasks.normalization import Normalization

FITS = 0.99  # cosine of an update and the one computed again
LIKE = 0.8  # cosine of local training and of fewer or more steps of it
SCALE = 1.1  # factor by which their lengths may differ
MOST_STEPS = 32  # that are tried in place of a wrong number of them
TAIL = 16  # zeros at the end of an update, at the least, by which it counts as cut off
MOST_BIAS = 2.0  # the L1 norm of cross-entropy's gradient by the last bias is at most this
BATCH_NORM = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
_CALLS = {"training": "train", "evaluation": "eval"}


def preflight(
    capture: Capture,
    model: nn.Module,
    loss: Loss = nn.functional.cross_entropy,
    *,
    truth: tuple[Tensor, Tensor] | None = None,
    normalization: Normalization | None = None,
    defense: Chain | None = None,
) -> list[str]:
    """What is probably wrong with a capture or with what is said of it, a line for each; nothing where all fits.

    model: as it will be attacked, in the mode in which it is. truth: inputs and targets, as the model took them.
    """
    capture.check(model)
    chain = defense if defense is not None else Chain.of(capture.public.defense)
    found = [*_modes(capture, model), *_cut_off(capture, chain)]
    if truth is not None and not chain.defenses:
        found += _compared(capture, model, loss, truth, normalization)
    elif loss is nn.functional.cross_entropy and not chain.defenses:
        found += _bias_signs(capture, model)
    return found


# ---- what shows in the update alone --------------------------------------------------------------------------


def _modes(capture: Capture, model: nn.Module) -> Iterator[str]:
    """Batch norm and dropout: whether the model is in the mode in which it was trained."""
    norms = [module for module in model.modules() if isinstance(module, BATCH_NORM)]
    if norms and capture.buffers and capture.buffers_before:
        pairs = [(name, capture.buffers_before[name], after) for name, after in capture.buffers.items()]
        moved = any(not torch.equal(before, after) for _, before, after in pairs)
        if moved and not norms[0].training:
            yield (
                "batch norm was in training mode, for its statistics moved, and the model is in evaluation mode: call "
                "model.train()"
            )
        if not moved and norms[0].training:
            yield (
                "batch norm was in evaluation mode, for its statistics did not move, and the model is in training "
                "mode: call model.eval()"
            )
        counts = {int(after - before) for name, before, after in pairs if name.endswith("num_batches_tracked")}
        if moved and len(counts) == 1 and counts != {capture.steps}:
            yield f"batch norm counted {counts.pop()} steps, and the capture says {capture.steps}: the steps are wrong"
    elif norms and norms[0].training and max(capture.batch_sizes) == 1:
        yield "batch norm cannot have been in training mode with single examples: call model.eval()"
    if any(isinstance(module, DROPOUT) and module.p > 0 and module.training for module in model.modules()):
        yield "dropout is active in the model, and no attack can repeat it: call model.eval() if the client had it off"


def _cut_off(capture: Capture, chain: Chain) -> Iterator[str]:
    """An update whose end is zero: it was truncated on the way."""
    if any("prun" in defense.name or "mask" in defense.name for defense in chain.defenses):
        return
    flat = torch.cat([tensor.flatten() for tensor in _change(capture).values()])
    used = flat.nonzero().flatten()
    if not len(used):
        yield "the update is zero throughout: nothing was sent, or the client did not train"
        return
    tail = len(flat) - 1 - int(used[-1])
    if tail >= min(TAIL, len(flat) // 4):
        yield f"the last {tail:,} of {len(flat):,} numbers of the update are zero: it was truncated"


def _bias_signs(capture: Capture, model: nn.Module) -> Iterator[str]:
    """The gradient by the last bias, a mean of softmax minus one-hot, tells the sign and the scale of the whole."""
    gradient = pseudo_gradient(capture)
    last = [name for name, tensor in gradient.items() if tensor.dim() == 1 and name.endswith("bias")][-1:]
    heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not last or not heads or last[0] != f"{heads[-1]}.bias" or last[0] != list(gradient)[-1]:
        return
    bias = gradient[last[0]].double()
    if abs(float(bias.sum())) > 0.05 * float(bias.abs().sum()):
        return  # not a gradient of cross-entropy over these outputs
    examples = sum(capture.batch_sizes)
    negative, positive = int((bias < 0).sum()), int((bias > 0).sum())
    if positive <= examples < negative:
        yield "the sign is flipped: only the classes of a batch may have a negative gradient by the last bias"
    length = float(bias.abs().sum())
    if length > MOST_BIAS * SCALE:
        yield (
            f"the update is at least {length / MOST_BIAS:.1f} times as long as cross-entropy can make it: the learning "
            "rate or the number of steps is wrong, or the loss is a sum"
        )


# ---- what shows beside the truth -----------------------------------------------------------------------------


def _compared(
    capture: Capture, model: nn.Module, loss: Loss, truth: tuple[Tensor, Tensor], normalization: Normalization | None
) -> Iterator[str]:
    """The update computed again from what was behind it: what fits, if not the capture as it stands?"""
    sent = torch.cat([tensor.flatten().double() for tensor in _change(capture).values()])

    def fit(inputs: Tensor, *, training: bool | None = None, as_if: Capture = capture) -> tuple[float, float]:
        made = _made(as_if, model, loss, inputs, truth[1], training)
        ratio = float(sent.norm() / made.norm().clamp_min(1e-300))
        return float(cosine_similarity(sent, made, dim=0)), ratio

    cosine, ratio = fit(truth[0])
    steady = 1 / SCALE <= ratio <= SCALE
    # The order of the examples of several steps is not known, and moves the update a little.
    if cosine >= FITS or (capture.kind != "gradient" and cosine >= LIKE and (capture.steps > 1 or not steady)):
        if not steady:
            yield _scaled(capture, ratio)
        return
    if cosine <= -FITS:
        yield "the sign is flipped: the update is the opposite of what its examples give"
        return
    norms = any(isinstance(module, BATCH_NORM) for module in model.modules())
    drops = any(isinstance(module, DROPOUT) and module.p > 0 for module in model.modules())
    if norms or drops:
        now = model.training
        if fit(truth[0], training=not now)[0] >= FITS:
            was, is_now = ("evaluation", "training") if now else ("training", "evaluation")
            what = "batch norm" if norms else "dropout"
            yield f"{what} was in {was} mode, and the model is in {is_now} mode: call model.{_CALLS[was]}()"
            return
    if normalization is not None:
        ways: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
            (normalization.normalize, "the model took normalized pictures, and the truth has pixels"),
            (normalization.pixels, "the model took pixels, and the truth has normalized pictures"),
        )
        for way, words in ways:
            if fit(way(truth[0].float()).to(truth[0].dtype))[0] >= FITS:
                yield f"the normalization does not match: {words}"
                return
    steps = next((n for n in _other_steps(capture) if fit(truth[0], as_if=_stepping(capture, n))[0] >= FITS), None)
    if steps is not None:
        yield f"the update fits {steps} local steps, and the capture says {capture.steps}: the number of steps is wrong"
    elif drops:
        yield f"the update does not fit its examples (cosine {cosine:.2f}): dropout was active, which none can repeat"
    else:
        yield (
            f"the update does not fit its examples (cosine {cosine:.2f}): check the truth, the normalization, the "
            "order of local steps, and what the client's loss adds"
        )


def _other_steps(capture: Capture) -> list[int]:
    """How many local steps there may have been instead: as many as the others are forgotten or counted twice."""
    if capture.kind == "gradient" or len({*capture.batch_sizes}) > 1 or len({*capture.lr}) > 1:
        return []
    return [n for n in range(1, min(4 * capture.steps, MOST_STEPS) + 1) if n != capture.steps]


def _stepping(capture: Capture, steps: int) -> Capture:
    facts = {**capture.facts, "local_epochs": None}
    sizes, rates = capture.batch_sizes[:1] * steps, capture.lr[:1] * steps
    return replace(capture, steps=steps, batch_sizes=sizes, lr=rates, facts=facts)


def _scaled(capture: Capture, ratio: float) -> str:
    if capture.kind == "gradient":
        return (
            f"the update is {ratio:.3g} times the mean gradient of its examples: the loss was not a mean over the batch"
        )
    return (
        f"the update is {ratio:.3g} times as long as {capture.steps} steps at lr {capture.lr[0]:g} make it: the "
        "learning rate or the number of steps is wrong"
    )


def _change(capture: Capture) -> Tensors:
    """What was sent, as a gradient or as the change of the weights."""
    if capture.kind != "weights":
        return dict(capture.shared)
    return {name: tensor - capture.before[name] for name, tensor in capture.shared.items()}


def _made(
    capture: Capture, model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, training: bool | None
) -> Tensor:
    """The gradient, or the change of the weights, that these examples give in the client's local steps."""
    own = copy.deepcopy(model)
    if training is not None:
        own.train(training)
    own.load_state_dict({**dict(capture.before), **(capture.buffers_before or {})}, strict=False)
    trained = {name: parameter for name, parameter in own.named_parameters() if parameter.requires_grad}
    start, rows = 0, len(targets)
    if inputs.is_floating_point():
        inputs = inputs.to(next(iter(trained.values())).dtype)
    moment = {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    for lr, size in zip(capture.lr, capture.batch_sizes, strict=True):
        place = torch.arange(start, start + size) % rows  # every epoch goes through the same examples
        start += size
        gradients = torch.autograd.grad(
            loss(own(inputs[place]), targets[place]), list(trained.values()), allow_unused=True
        )
        given = dict(zip(trained, gradients, strict=True))
        if capture.kind == "gradient":
            return torch.cat([_flat(given[name], trained[name]) for name in capture.shared])
        with torch.no_grad():
            for name, parameter in trained.items():
                decayed = _flat(given[name], parameter).reshape(parameter.shape).to(parameter.dtype)
                decayed = decayed + (capture.public.weight_decay or 0.0) * parameter
                moment[name] = capture.momentum * moment[name] + decayed
                parameter.sub_(lr * moment[name])
    return torch.cat([(trained[name] - capture.before[name]).detach().flatten().double() for name in capture.shared])


def _flat(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    made = torch.zeros_like(parameter) if gradient is None else gradient
    return made.detach().flatten().double()
