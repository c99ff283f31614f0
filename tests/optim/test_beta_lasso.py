"""beta-LASSO's optimizer against the written-out step, and torch's SGD."""

import torch

from widemix.optim.optimizers import BetaLasso


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64)) for _ in range(2)]


def test_step_is_the_written_out_one():
    lr, l1, beta = 0.1, 0.01, 20.0
    (ours, _), (reference, _) = weights(), weights()
    optimizer = BetaLasso([ours], lr=lr, l1=l1, beta=beta)
    came_back = False
    for step in range(30):
        gradient = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) * 3
        ours.grad = gradient.clone()
        optimizer.step()
        before = reference.detach().clone()
        with torch.no_grad():
            for place in range(35):
                w = before.view(-1)[place].item()
                sign = (w > 0) - (w < 0)
                w = w - lr * (gradient.view(-1)[place].item() + l1 * sign)
                reference.view(-1)[place] = w if abs(w) >= beta * l1 else 0.0
        came_back |= bool(((before == 0) & (reference != 0)).any())
        assert torch.allclose(ours, reference, rtol=1e-12)
        assert ((ours.abs() >= beta * l1) | (ours == 0)).all()
    assert came_back  # zero is no trap


def test_a_closure_computes_the_gradients_and_its_loss_is_returned():
    (ours, _), (reference, _) = weights(), weights()

    def closure_of(optimizer, weight):
        def closure():
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            return loss

        return closure

    pairs = [(BetaLasso([ours], lr=0.1, l1=0.0, beta=50), ours), (torch.optim.SGD([reference], lr=0.1), reference)]
    losses = [[optimizer.step(closure_of(optimizer, weight)).item() for _ in range(3)] for optimizer, weight in pairs]
    assert losses[0] == losses[1] != sorted(losses[0])
    assert torch.equal(ours, reference)


def test_weights_at_the_threshold_or_without_a_gradient_stay():
    weight, other = (torch.nn.Parameter(torch.tensor([0.75, 0.625, -0.75, 0.0])) for _ in range(2))
    optimizer = BetaLasso([{"params": [weight, other]}], lr=1.0, l1=0.25, beta=2.0)
    weight.grad = torch.zeros(4)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert other.tolist() == [0.75, 0.625, -0.75, 0.0]


def test_momentum_is_of_gradient_and_sign_together():
    first, second = (torch.nn.Parameter(torch.tensor([4.0, -4.0])) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.25, "l1": 0.5, "momentum": 0.0, "beta": 7.0}]
    optimizer = BetaLasso(groups, lr=0.5, l1=0.25, beta=1.0, momentum=0.5)
    for _ in range(2):
        first.grad, second.grad = torch.ones(2), torch.ones(2)
        optimizer.step()
    # Directions 1 + 0.25 and 1 - 0.25 of the signs; the second step goes half as far again by the first.
    assert first.tolist() == [4 - 0.5 * 1.25 * 2.5, -4 - 0.5 * 0.75 * 2.5]
    assert second.tolist() == [0.0, -4 - 2 * 0.25 * 0.5]  # 3.25 is under 7 x 0.5
    assert first.grad.tolist() == [1, 1]
