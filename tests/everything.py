"""Everything that a rank imports, for the process that `tests.forks` forks ranks from."""

import os
import warnings

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own
    import deepspeed  # noqa: F401
    import timm  # noqa: F401
    import torchmetrics.classification  # noqa: F401

    import pipeline.engine.ddp
    import pipeline.engine.deepspeed
    import pipeline.engine.fsdp
    import pipeline.train
    import pipeline.training.finetune
    import pipeline.training.loop  # noqa: F401
