"""The published networks by name, as model sections: the paper's name in lower case, the picture's side last."""

from pipeline.recipe.family import Family
from pipeline.recipe.model import LassoSection, MixerSection, ShallowSection, SwMlpSection
from pipeline.recipe.relatives import FfOnlySection, PermutatorSection, RepMlpSection

# Tolstikhin et al. 2021, table 1: C, L, D_S, D_C.
MIXER_SIZES = {"s": (512, 8, 256, 2048), "b": (768, 12, 384, 3072), "l": (1024, 24, 512, 4096)}
HUGE = (1280, 32, 640, 5120)

# Hayase & Karakida 2024, tables 1 and S.3: picture side, P, C, L, gamma. Where a table contradicts the text, both.
WIDE_MIXERS = {
    "b_w": (224, 14, 588, 8, 4.57),  # as in the text
    "b_w_table1": (224, 14, 588, 8, 4.09),  # which table 1's Omega and width need
    "ss8": (32, 8, 986, 2, 4.0),
    "ss_w": (32, 4, 487, 2, 4.0),  # as in the text
    "ss_w_table1": (32, 4, 467, 2, 4.0),  # table 1's 255 M connections, those of the patch layer among them
}

TIMM_OWN = ("mixer_s32_224", "mixer_s16_224", "mixer_b32_224", "mixer_b16_224", "mixer_l32_224", "mixer_l16_224")


def _mixers() -> dict[str, tuple[MixerSection, int]]:
    """The normal MLP-Mixers."""
    sizes = {f"{letter}{patch}": (patch, *size) for letter, size in MIXER_SIZES.items() for patch in (32, 16)}
    sizes["h14"] = (14, *HUGE)
    result = {}
    for name, (patch, channels, depth, token_hidden, channel_hidden) in sizes.items():
        section = MixerSection(
            kind="mixer",
            patch_size=patch,
            tokens=(224 // patch) ** 2,
            channels=channels,
            depth=depth,
            token_hidden=token_hidden,
            channel_hidden=channel_hidden,
        )
        result[name] = section, 224
    for name, (side, patch, channels, depth, expansion) in WIDE_MIXERS.items():
        section = MixerSection(
            kind="mixer",
            patch_size=patch,
            tokens=(side // patch) ** 2,
            channels=channels,
            depth=depth,
            expansion=expansion,
        )
        result[name] = section, side
    return result


def _named() -> dict[str, tuple[Family, int]]:
    result: dict[str, tuple[Family, int]] = {}
    for size, (mixer, side) in _mixers().items():
        hidden = ("token_hidden", "channel_hidden", "expansion")
        single = mixer.model_copy(update={"kind": "s_mixer", **dict.fromkeys(hidden)})
        kinds = {"mixer": mixer} if size.endswith("table1") else {"mixer": mixer, "s_mixer": single}
        for kind, section in kinds.items():
            result[f"{kind}_{size}_{side}"] = section, side
            result[f"rp_{kind}_{size}_{side}"] = section.model_copy(update={"permutation": "random"}), side
    # Omega = 2^18 at gamma 1; as wide as an S-Mixer of S = C = 64; Omega = 2^21 at gamma 2.
    for width, density, gamma in ((1619, 0.1, None), (4096, 1 / 64, None), (8192, 1 / 64, 2.0)):
        sw_mlp = SwMlpSection(kind="sw_mlp", width=width, depth=6, density=density, expansion=gamma)
        result[f"sw_mlp_{width}_32"] = sw_mlp, 32
    result["shallow_dense_4096_32"] = ShallowSection(kind="shallow", width=4096, matrices="dense"), 32
    result["shallow_monarch_4096_32"] = ShallowSection(kind="shallow", width=4096, matrices="monarch"), 32
    result["shallow_kronecker_4096_32"] = ShallowSection(kind="shallow", width=4096, matrices="kronecker"), 32
    result["s_fc_32"] = LassoSection(kind="s_fc", base_channels=150), 32
    result["s_local_32"] = LassoSection(kind="s_local", base_channels=150), 32
    result["ff_only_b16_224"] = FfOnlySection(kind="ff_only", patch_size=16, channels=768, depth=12), 224
    result["permutator_s14_224"] = PermutatorSection(kind="permutator", patch_size=14, channels=384, depth=18), 224
    repmlp = RepMlpSection(kind="repmlp", patch_size=16, channels=512, depth=8, share_sets=32)
    result["repmlp_s16_224"] = repmlp, 224
    return result


NAMED = _named()

# What the paper prints of a network where that contradicts its own definitions.
PRINTED = {
    "mixer_b_w_224": "table 1: Omega 2.6e8, width 6.2e5 (gamma 4.09 gives these); table S.3, at gamma 4: 4.06 G",
    "mixer_b_w_table1_224": "the text: gamma 4.57, which gives Omega 2.90e8 and width 6.88e5",
    "mixer_b16_224": "table 1: 786 channels for 768",
    "mixer_ss_w_32": "table 1: 255 M connections (C = 467 and the patch layer give these)",
    "mixer_ss_w_table1_32": "the text: C = 487, which gives 275 M connections",
}


def printed(section: Family) -> str | None:
    """What the paper prints of this network, its random-permuted twin included, where it errs."""
    plain = (
        section.model_copy(update={"permutation": "commutation"}) if isinstance(section, MixerSection) else section
    )
    return next((note for name, note in PRINTED.items() if NAMED[name][0] == plain), None)
