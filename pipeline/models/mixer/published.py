"""Published MLP-Mixers by name: their sizes, and what a paper prints of them that contradicts its definitions."""

from typing import Any

# Tolstikhin et al. 2021, table 1: C, L, D_S, D_C.
SIZES = {"s": (512, 8, 256, 2048), "b": (768, 12, 384, 3072), "l": (1024, 24, 512, 4096)}
_HUGE = (1280, 32, 640, 5120)

# Hayase & Karakida 2024, tables 1 and S.3: image side, P, C, L, gamma. Where a table contradicts the text, both.
_WIDE = {
    "b_w": (224, 14, 588, 8, 4.57),  # as in the text
    "b_w_table1": (224, 14, 588, 8, 4.09),  # which table 1's Omega and width need
    "ss8": (32, 8, 986, 2, 4.0),
    "ss_w": (32, 4, 487, 2, 4.0),  # as in the text
    "ss_w_table1": (32, 4, 467, 2, 4.0),  # table 1's 255 M connections, those of the patch layer among them
}

# What the paper prints of a network where that contradicts its own definitions.
NOTES = {
    "mixer_b_w_224": "table 1: Omega 2.6e8, width 6.2e5 (gamma 4.09 gives these); table S.3, at gamma 4: 4.06 G",
    "mixer_b_w_table1_224": "the text: gamma 4.57, which gives Omega 2.90e8 and width 6.88e5",
    "mixer_b16_224": "table 1: 786 channels for 768",
    "mixer_ss_w_32": "table 1: 255 M connections (C = 467 and the patch layer give these)",
    "mixer_ss_w_table1_32": "the text: C = 487, which gives 275 M connections",
}


def named_mixers(section: Any) -> dict[str, tuple[Any, int]]:
    """Each published Mixer with its image side, its S-Mixer (single layers), and both with random permutations.

    section: the class `MixerSection`.
    """
    result = {}
    for size, (mixer, side) in _mixers(section).items():
        hidden = ("token_hidden", "channel_hidden", "expansion")
        single = mixer.model_copy(update={"kind": "s_mixer", **dict.fromkeys(hidden)})
        kinds = {"mixer": mixer} if size.endswith("table1") else {"mixer": mixer, "s_mixer": single}
        for kind, each in kinds.items():
            result[f"{kind}_{size}_{side}"] = each, side
            result[f"rp_{kind}_{size}_{side}"] = each.model_copy(update={"permutation": "random"}), side
    return result


def _mixers(section: Any) -> dict[str, tuple[Any, int]]:
    """The normal MLP-Mixers by size, each with its image side."""
    sizes = {f"{letter}{patch}": (patch, *size) for letter, size in SIZES.items() for patch in (32, 16)}
    sizes["h14"] = (14, *_HUGE)
    result = {}
    for name, (patch, channels, depth, token_hidden, channel_hidden) in sizes.items():
        hidden = {"token_hidden": token_hidden, "channel_hidden": channel_hidden}
        result[name] = section(kind="mixer", patch_size=patch, channels=channels, depth=depth, **hidden), 224
    for name, (side, patch, channels, depth, expansion) in _WIDE.items():
        shape = {"patch_size": patch, "channels": channels, "depth": depth}
        result[name] = section(kind="mixer", expansion=expansion, **shape), side
    return result
