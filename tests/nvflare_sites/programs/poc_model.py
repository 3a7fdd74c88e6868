"""The model of the deployment test: it begins with zeros wherever it is made."""

import torch


class Zeros(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10))
