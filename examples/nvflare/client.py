"""A site: an ordinary training script of NVFlare's client API. It knows nothing of fedveil."""

import argparse

import nvflare.client as flare
import torch
from model import DigitsNet
from sklearn.datasets import load_digits
from torch.nn import functional as F


def own_digits(site: int, sites: int, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every n-th picture of scikit-learn's digits."""
    digits = load_digits()
    pictures = torch.as_tensor(digits.images[site::sites] / 16, dtype=torch.float32)
    return pictures[:limit], torch.as_tensor(digits.target[site::sites])[:limit]


def main() -> None:
    """Train on the site's own digits whenever the server sends a model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", type=int, required=True)
    parser.add_argument("--sites", type=int, required=True)
    parser.add_argument("--limit", type=int, required=True, help="digits of the site")
    parser.add_argument("--broken", action="store_true", help="send NaN: training went wrong at this site")
    args = parser.parse_args()
    pictures, labels = own_digits(args.site, args.sites, args.limit)
    model = DigitsNet()
    flare.init()
    while flare.is_running():
        received = flare.receive()
        model.load_state_dict({name: torch.as_tensor(array) for name, array in received.params.items()})
        accuracy = (model(pictures).argmax(1) == labels).float().mean().item()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = torch.randperm(len(labels)).split(32)
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[batch]), labels[batch]).backward()
            optimizer.step()
        weights = {name: weight * torch.nan if args.broken else weight for name, weight in model.state_dict().items()}
        flare.send(
            flare.FLModel(
                params=weights,
                metrics={"accuracy": accuracy},  # of the model that came, on the site's own data
                meta={"NUM_STEPS_CURRENT_ROUND": len(batches)},
            )
        )


if __name__ == "__main__":
    main()
