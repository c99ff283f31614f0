"""timm's own train.py on a prepared folder: timm_train.py path/to/train.py FOLDER --val-split val --model ..."""

import runpy
import sys

import timm.data

import widemix

SAME = """
re_prob re_mode re_count scale ratio hflip color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob
auto_augment interpolation crop_pct mean std img_dtype device num_workers
""".split()  # noqa: SIM905


class Loader(widemix.Loader):
    sampler = batch_sampler = None

    @property
    def dataset(self):
        return self  # on which train.py calls set_epoch


def create_loader(dataset, input_size, batch_size, is_training=False, collate_fn=None, **options):
    """timm's create_loader; `collate_fn` is timm's mixup, of which the loader takes the settings."""
    keys = {name: options[name] for name in SAME if options.get(name) is not None}
    if "auto_augment" in keys:
        keys.pop("color_jitter", None)  # as timm
    if mix := collate_fn:
        keys |= {"mixup": mix.mixup_alpha, "cutmix": mix.cutmix_alpha, "cutmix_minmax": mix.cutmix_minmax}
        keys |= {"mixup_prob": mix.mix_prob, "mixup_switch_prob": mix.switch_prob, "mixup_mode": mix.mode}
        keys |= {"smoothing": mix.label_smoothing, "mix_group": batch_size, "num_classes": mix.num_classes}
    return Loader(*dataset, batch_size, input_size[-1], is_training=is_training, **keys)


if __name__ == "__main__":
    timm.data.create_dataset = lambda name, root, split, **options: (root, split)
    timm.data.create_loader = create_loader
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
