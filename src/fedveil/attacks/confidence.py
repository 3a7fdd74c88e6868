"""How sure a trained model is of given examples: what tests of membership look at."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from fedveil.attacks.scene import Public, Suspects
from fedveil.tasks.inputs import as_arguments, map_inputs, take

AT_ONCE = 512  # examples that go through the model at a time


def confidences(public: Public, weights: Mapping[str, Tensor], suspects: Suspects) -> Tensor:
    """How sure a model with these weights and buffers is of each example's label, in double precision: shape (N,).

    Of a model with one score per class, log p/(1 − p) of the right class, which falls as the loss rises and does not
    run into the border of probabilities as the loss does. Of any other, minus the loss.
    """
    model = copy.deepcopy(public.model).eval()
    like = next(tensor for tensor in weights.values() if tensor.is_floating_point())
    found = []
    with torch.no_grad():
        for start in range(0, suspects.count, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            taken = public.layout.inputs(take(suspects.inputs, part))
            inputs = map_inputs(lambda tensor: tensor.to(like.device), taken)
            labels = suspects.labels[part].to(like.device)
            arguments, keywords = as_arguments(inputs)
            outputs = functional_call(model, dict(weights), arguments, keywords)
            if public.classes is not None:
                found.append(_log_odds(outputs.double(), labels))
            else:
                each = [public.loss(outputs[[row]], labels[[row]]) for row in range(len(labels))]
                found.append(-torch.stack(each).double())
    return torch.cat(found).cpu()


def _log_odds(scores: Tensor, labels: Tensor) -> Tensor:
    own = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], -torch.inf).logsumexp(1, keepdim=True)
    return (own - others).squeeze(1)
