"""One plain PyTorch loop, as any textbook could hold it: of ours it uses the model and the batches alone."""

import torch
from timm.optim import Lamb
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def plain_loop(model, batches, rates, *, optim, loss="softmax", dtype=torch.float32, ema=None) -> list[float]:
    """Train `model` on (pictures, soft labels), a learning rate for each; the loss of every step. `ema` is timm's."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if optim.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=optim.momentum, nesterov=True)
    elif optim.name == "lamb":
        optimizer = Lamb(groups, lr=1.0, betas=optim.betas, eps=optim.eps, max_grad_norm=None)
    else:
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=optim.betas, eps=optim.eps)
    model.train()
    losses = []
    for step, ((images, targets), rate) in enumerate(zip(batches, rates, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images).float()
        if loss == "sigmoid":
            value = binary_cross_entropy_with_logits(logits, targets) * logits.shape[1]
        else:
            value = cross_entropy(logits, targets)
        optimizer.zero_grad()
        value.backward()
        if optim.clip_grad:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        optimizer.step()
        if ema:
            ema.update(model, step + 1)
        losses.append(value.item())
    return losses
