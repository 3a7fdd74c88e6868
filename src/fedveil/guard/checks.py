"""What `Guard` refuses: settings that cannot work, and steps that would release what is not protected."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.utils.weak import TensorWeakRef

from fedveil.defenses.chain import Chain
from fedveil.defenses.poisson import beyond_chance
from fedveil.errors import FedveilError


def check_settings(
    chain: Chain, trained: Mapping[str, nn.Parameter], batch_size: int | None, dataset_size: int | None
) -> None:
    """Refuse a guard that could protect nothing."""
    if chain.aggregates:
        raise FedveilError(f"{chain} acts on the server: there is nothing for a client to guard")
    if not trained:
        raise FedveilError("the model has no parameters to train: there is no gradient to protect")
    chain.check_parameters(trained)
    if batch_size is not None and batch_size < 1:
        raise FedveilError(f"batch_size must be 1 or more (got {batch_size})")
    if chain.random_sizes and batch_size is None:
        raise FedveilError(
            f"{chain} divides by the planned batch size, for the size at hand is a secret: give batch_size=, "
            "and draw batches with fedveil.poisson_loader"
        )
    if dataset_size is not None and dataset_size < (batch_size or 1):
        raise FedveilError(f"dataset_size must be at least {batch_size or 1}, a batch (got {dataset_size})")


def check_acting(chain: Chain, *, attached: bool) -> None:
    """Refuse a step that the chain does not protect, or that it would protect twice."""
    if chain.defenses and all(defense.acts_at == "upload" for defense in chain.defenses):
        raise FedveilError(f"{chain} protects the upload, not a gradient: train as usual and call upload()")
    if attached:
        raise FedveilError(
            "this Guard is attached to an optimizer, which would protect a gradient twice: call loss.backward() "
            "and step, or remove() the attachment first"
        )


def check_size(chain: Chain, size: int, planned: int | None) -> None:
    """Refuse a batch that chance does not make."""
    if chain.random_sizes and planned is not None and beyond_chance(size, planned):
        raise FedveilError(
            f"a batch of {size} examples is not one that Poisson sampling draws with batch_size={planned}: "
            "give the planned size of a whole step, and draw batches with fedveil.poisson_loader"
        )


def check_cleared(chain: Chain, trained: Mapping[str, nn.Parameter], written: Mapping[str, TensorWeakRef]) -> None:
    """Refuse to add to what was protected before: two protected gradients are not a protected sum."""
    if not chain.changes_gradient:
        return
    for name, parameter in trained.items():
        last, gradient = written.get(name), parameter.grad
        if last and gradient is not None and last() is gradient and bool(gradient.any()):
            raise FedveilError(
                ".grad still holds the protected gradient of the last backward: clear it with zero_grad(), or put "
                "the micro-batches of one step into 'with guard.accumulate():'"
            )
