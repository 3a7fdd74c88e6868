"""Environments of the peers: `python -m benchmarks.peers.environment breaching` makes one, under benchmarks/.peers/."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from fedveil.errors import FedveilError

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".peers"

# What `pip install` is called with, one call after another. The peers' own requirements name packages that only their
# other parts use, and a torchvision that would bring a second torch with gigabytes for graphics cards.
INSTALLS: dict[str, list[list[str]]] = {
    "breaching": [
        ["torch==2.13.0"],
        ["--no-deps", "torchvision==0.28.0", "breaching==0.1.2"],
        ["hydra-core>=1.1,<1.4", "omegaconf<2.4", "antlr4-python3-runtime==4.9.*", "numpy", "pillow", "scipy"],
    ],
    "flower": [
        ["torch==2.13.0"],
        ["flwr[simulation]>=1.41,<1.43", "numpy"],
    ],
    "opacus": [
        ["torch==2.13.0"],
        ["--no-deps", "opacus==1.6.0"],
        ["numpy", "scipy", "opt-einsum"],
    ],
    "pfl": [
        ["torch==2.13.0"],
        ["--no-deps", "pfl==0.6.0"],
        ["dp-accounting>=0.4,<0.6", "multiprocess>=0.70.15,<0.71", "numpy>=1.21,<3", "packaging>=24,<26"],
        ["prv-accountant>=0.2,<0.3", "scipy>=1.7.3"],
    ],
}


def python_of(peer: str) -> Path:
    """The Python of a peer's environment, which is made the first time."""
    if peer not in INSTALLS:
        raise FedveilError(f"no such peer: {peer}; there are: {', '.join(INSTALLS)}")
    folder = ENVIRONMENTS / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join(" ".join(packages) for packages in INSTALLS[peer])
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"setting up {peer} in {folder.relative_to(HERE.parent.parent)}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    for packages in INSTALLS[peer]:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
            raise FedveilError(f"{peer} cannot be installed: pip install {' '.join(packages)}: {reason}")
    ready.write_text(wanted)
    return python


if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or INSTALLS:
            print(python_of(name))
    except FedveilError as error:
        sys.exit(f"error: {error}")
