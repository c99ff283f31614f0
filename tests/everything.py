"""Everything that a rank imports, for the process that `tests.forks` forks ranks from."""

import atexit
import gc
import os
import warnings

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

gc.disable()  # as tests/conftest.py does

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - any ZeRO imports it
    import hypothesis  # noqa: F401 - as pytest: the file of what a fork calls does
    import pytest  # noqa: F401
    import timm  # noqa: F401
    import torch._dynamo  # noqa: F401 - any optimizer imports it
    import torchmetrics.classification  # noqa: F401

    import widemix.engine.deepspeed
    import widemix.engine.fsdp
    import widemix.engine.memory_layout
    import widemix.engine.torch_engine
    import widemix.estimate.hardware
    import widemix.evaluation.assessment
    import widemix.launch.local
    import widemix.report.page
    import widemix.trainer
    import widemix.training.finetune
    import widemix.training.loop  # noqa: F401
    from widemix.cli.commands import tune_garbage_collector
    from widemix.cli.parser import make_parser

    make_parser()  # which imports what the commands bring

gc.freeze()  # a fork looks for garbage only among its own objects, and copies no page to do so
gc.enable()
tune_garbage_collector()
atexit.register(gc.unfreeze)  # Triton complains of what is not freed at the end
