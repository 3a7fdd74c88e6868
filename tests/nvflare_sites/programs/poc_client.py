"""The training script of the deployment test: it adds one to every weight, and a text that must not leave the site."""

import sys

import nvflare.client as flare


def main() -> None:
    flare.init()
    while flare.is_running():
        received = flare.receive()
        wrong = float("nan") if "--broken" in sys.argv else 1.0
        changed = {name: weight + wrong for name, weight in received.params.items()}
        flare.send(
            flare.FLModel(
                params=changed,
                metrics={"accuracy": 0.123456, "canary": 1234567.0},
                meta={"NUM_STEPS_CURRENT_ROUND": 3, "note": "canary of the patient"},
            )
        )


if __name__ == "__main__":
    main()
