"""One plain PyTorch loop, as in any textbook: of our code it uses only the model and the batches."""

import schedulefree
import torch
from timm.optim import Lamb
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss


def plain_loop(model, batches, rates, *, optim, loss="softmax", dtype=torch.float32, ema=None, optimizers=()):
    """Train `model` on (images, soft labels), a learning rate for each; the loss of every step. `ema` is timm's."""
    optimizers, given = optimizers or plain_optimizers(model, optim), bool(optimizers)
    model.train()
    losses = []
    for step, ((images, targets), rate) in enumerate(zip(batches, rates, strict=True)):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate * group.get("lr_scale", 1)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        if loss == "sigmoid":
            value = binary_cross_entropy_with_logits(logits, targets) * logits.shape[1]
        elif loss == "mse":
            value = mse_loss(logits, targets)
        else:
            value = cross_entropy(logits, targets)
        model.zero_grad()
        value.backward()
        if optim.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        for optimizer in optimizers:
            optimizer.step()
        if ema:
            ema.update(model, step + 1)
        losses.append(value.item())
    if optim.name == "schedule_free" and not given:
        optimizers[0].eval()  # leaves the weights to evaluate with
    return losses


def plain_optimizers(model, optim) -> list[torch.optim.Optimizer]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = {"lr": 1.0, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "sgd":
        return [torch.optim.SGD(groups, lr=1.0, momentum=optim.momentum, nesterov=True)]
    if optim.name == "lamb":
        return [Lamb(groups, **adam, max_grad_norm=None)]
    if optim.name == "schedule_free":
        optimizer = schedulefree.AdamWScheduleFree(groups, **adam)
        optimizer.train()
        return [optimizer]
    if optim.name == "muon":
        inner = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]
        groups[0]["params"] = [
            p for name, p in model.named_parameters() if name in ("stem.proj.weight", "head.weight")
        ]
        scale = {"weight_decay": optim.weight_decay, "momentum": optim.momentum, "adjust_lr_fn": "match_rms_adamw"}
        return [torch.optim.Muon(inner, lr=1.0, **scale), torch.optim.AdamW(groups, **adam)]
    return [torch.optim.AdamW(groups, **adam)]
