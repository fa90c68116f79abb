"""GPTQ and AWQ as gptqmodel makes them.

A program: `python gptqmodel_package.py JOB.json`. The job says the directory of a model, that of the
checkpoint to write, a file of token windows (NumPy, [windows, tokens]), the method and the size of a group.
"""

import json
import os
import sys
from pathlib import Path

# Its pool of workers for a CPU would be larger than the machine.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(len(os.sched_getaffinity(0))))

import numpy as np
from gptqmodel import GPTQModel, QuantizeConfig, __version__  # type: ignore[import-not-found,import-untyped,unused-ignore]
from gptqmodel.quantization import FORMAT, METHOD  # type: ignore[import-not-found,import-untyped,unused-ignore]


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    of_method = (
        {"desc_act": False, "sym": True}
        if job["method"] == "gptq"
        else {"method": METHOD.AWQ, "format": FORMAT.GEMM, "sym": False}
    )
    model = GPTQModel.load(job["model"], QuantizeConfig(bits=4, group_size=job["group"], device="cpu", **of_method))
    windows = np.load(job["windows"])
    model.quantize(
        [{"input_ids": window.tolist(), "attention_mask": [1] * len(window)} for window in windows], batch_size=1
    )
    model.save(job["checkpoint"])
    Path(job["checkpoint"], "made-by.txt").write_text(f"gptqmodel {__version__}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
