"""Three sites train on digits under a defense. The third one is broken: its results are refused, the others go on.

python job.py --workspace /tmp/digits
"""

import argparse
from pathlib import Path

from model import DigitsNet
from nvflare import FedJob, FilterType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.script_runner import ScriptRunner

from fedveil.nvflare import ProtectFilter, ReceiveFilter

SITES = 3


def digits_job(
    defense: str, rounds: int, broken: int | None, captures: Path | None = None, limit: int = 1797 // SITES
) -> FedJob:
    """The job: FedAvg that goes on without a result that a site refused to send.

    captures: the folder in which sites keep what left them.
    """
    sizes = [32] * (limit // 32) + [limit % 32] * (limit % 32 > 0)
    facts = {"shape": [1, 8, 8], "classes": 10}  # for whoever attacks a capture
    told = {"folder": str(captures and captures.absolute()), "lr": 0.5, "batch_sizes": sizes, "facts": facts}
    job = FedJob(name="digits")
    job.set_app_packages(["fedveil"])  # installed at the sites: not copied into the job
    persistor = job.to_server(PTModel(DigitsNet()))["persistor_id"]
    job.to_server(FedAvg(num_clients=SITES, num_rounds=rounds, persistor_id=persistor, ignore_result_error=True))
    for number in range(SITES):
        site = f"site-{number + 1}"
        words = f"--site {number} --sites {SITES} --limit {limit}" + (" --broken" if number == broken else "")
        job.to(ScriptRunner(script="client.py", script_args=words), site)
        job.to(ReceiveFilter(), site, tasks=["train"], filter_type=FilterType.TASK_DATA)
        protect = ProtectFilter(defense, metrics=["accuracy"], captures=told if captures else None)
        job.to(protect, site, tasks=["train"], filter_type=FilterType.TASK_RESULT)
    return job


def main() -> None:
    """Run the job in NVFlare's simulator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--defense", default="gradient-dropout:at=upload,keep=0.8,sigma=0.001")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broken", type=int, default=2, help="the number of the site that fails, -1 for none")
    parser.add_argument("--captures", type=Path, help="a folder in which sites keep what left them")
    parser.add_argument("--limit", type=int, default=1797 // SITES, help="digits of a site")
    args = parser.parse_args()
    job = digits_job(args.defense, args.rounds, args.broken, args.captures, args.limit)
    job.simulator_run(str(args.workspace), threads=SITES)


if __name__ == "__main__":
    main()
