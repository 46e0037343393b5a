"""Make .venv and install Stairs into it: `python scripts/install.py run|dev`.

Says what it will install and how large that is before it does. A torch >= 2.11 that this Python
can already import is kept: its site-packages folders are added to the new environment's path.
Otherwise an NVIDIA driver that answers picks the `gpu` extra, and none the `cpu` extra.
Standard library only, so that a bare Python >= 3.11 can run it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST_TORCH = (2, 11)

# Measured on Linux x86-64 with Python 3.11: (download, on disk). Tools are the dev extra's share.
SIZES = {
    "kept": ("about 90 MB", "380 MB"),
    "cpu": ("about 290 MB with a CPU build of torch", "1.3 GB"),
    "gpu": ("about 3 GB", "6 GB"),
}
TOOLS = "and 260 MB of test tools, 850 MB on disk"
CUDA_HINT = (
    "  Note: where pip finds only torch's CUDA build (usual on Linux) that is about 3 GB more.\n"
    "  To take the CPU build, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index and run this again."
)

PROBE = """
import json, sys, torch
folders = [p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))]
print(json.dumps({"version": torch.__version__, "folders": folders}))
"""


def importable_torch() -> dict[str, object] | None:
    """The torch that the Python running this script can import, if it is new enough."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd="/")
    if probe.returncode:
        return None
    found = json.loads(probe.stdout.splitlines()[-1])
    version = tuple(int(part) for part in found["version"].split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        print(f"torch {found['version']} is older than 2.11, so another one is installed.")
        return None
    return dict(found)


def nvidia_answers() -> bool:
    """Whether a driver is there and lists a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU" in listing.stdout


def make_environment(kept: dict[str, object] | None) -> None:
    pip = [PYTHON, "-m", "pip", "--version"]
    if not PYTHON.exists() or subprocess.run(pip, capture_output=True).returncode:
        print(f"Making {VENV.relative_to(ROOT)} with {sys.executable}", flush=True)
        try:
            venv.create(VENV, clear=True, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("This Python has no ensurepip; on Debian and Ubuntu: apt install python3-venv")
    if kept:
        (site_packages,) = VENV.glob("lib/python3.*/site-packages")
        lines = "".join(f"{folder}\n" for folder in kept["folders"])  # type: ignore[attr-defined]
        (site_packages / "kept_torch.pth").write_text(lines)


def constraints(kept: dict[str, object] | None, extra: str) -> Path:
    """The tested set; without its torch and triton where another pair is kept or wanted."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if extra != "cpu":
        lines = [line for line in lines if not line.startswith(("torch==", "triton=="))]
    if kept:
        lines.append(f"torch=={kept['version']}")
    path = VENV / "constraints.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def main(purpose: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may be handed to this script
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"Stairs needs Python >= 3.11 and this is {found}: make run PYTHON=python3.12")
    kept = importable_torch()
    extra = "kept" if kept else "gpu" if nvidia_answers() else "cpu"
    download, disk = SIZES[extra]
    what = {
        "kept": f"on top of torch {kept['version']}, which is kept" if kept else "",
        "cpu": "with torch for the CPU: no NVIDIA driver answers",
        "gpu": "with torch 2.11 and Triton 3.6 for the GPU: an NVIDIA driver answers",
    }[extra]
    print(f"Installing Stairs into .venv, {what}.")
    print(f"  {download} to download, {disk} on disk" + (f"; {TOOLS}" if purpose == "dev" else ""))
    if extra == "cpu":
        print(CUDA_HINT)
    sys.stdout.flush()
    make_environment(kept)
    extras = [name for name in (extra, purpose) if name in ("cpu", "gpu", "dev")]
    target = f".[{','.join(extras)}]" if extras else "."
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--constraint", constraints(kept, extra), "--editable", target]
    sys.exit(subprocess.run(command, cwd=ROOT).returncode)


if __name__ == "__main__":
    if sys.argv[1:] not in (["run"], ["dev"]):
        sys.exit("usage: install.py run|dev")
    main(sys.argv[1])
