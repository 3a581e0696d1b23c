"""Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) over matrices, batched by shape, with the work shared out over the workers.

    The step size is scaled so that the root mean square of an update is that of AdamW at the same rate.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix that has a gradient."""
        workers = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        (group,) = self.param_groups
        matrices = sorted(group["params"], key=lambda item: tuple(item.shape))  # equal shapes side by side
        directions: dict[nn.Parameter, Tensor] = {}
        for matrix in matrices:
            buffer = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
            buffer.lerp_(matrix.grad, 1 - group["momentum"])
            directions[matrix] = matrix.grad.lerp(buffer, group["momentum"])
        flat = torch.zeros(sum(matrix.numel() for matrix in matrices))
        updates = dict(zip(matrices, flat.split([matrix.numel() for matrix in matrices]), strict=True))
        for shape in sorted({tuple(matrix.shape) for matrix in matrices}):
            mine = [matrix for matrix in matrices if tuple(matrix.shape) == shape][rank::workers]
            if mine:
                for matrix, update in zip(
                    mine, orthogonal(torch.stack([directions[m] for m in mine])), strict=True
                ):
                    updates[matrix].copy_(update.flatten())
        if workers > 1:
            dist.all_reduce(flat)
        for matrix, update in updates.items():
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update.view_as(matrix), alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: the matrices [n, rows, columns] with singular values close to one."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.transpose(1, 2) if tall else x).float()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The two optimizers; their learning rates are set before every step."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=True)
    return [Muon(matrices, lr=0.0, weight_decay=0.1, momentum=0.95), adam]


def export_state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Parameters and optimizer state as flat named tensors."""
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optim/{key}/{name}"] = torch.as_tensor(value).clone()
    return tensors


def import_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]
) -> None:
    """The reverse of `export_state`."""
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for full, value in tensors.items():
        if full.startswith("optim/"):
            _, key, name = full.split("/", 2)
            owner[parameters[name]].state[parameters[name]][key] = value.clone()


def grow(tensors: dict[str, Tensor], factor: int) -> dict[str, Tensor]:
    """State of a model `factor` times as deep: layer i becomes layers factor*i ... factor*i + factor - 1.

    The matrices that write to the residual stream are divided by `factor`, so that the deeper model starts
    out close to the function of the shallow one; optimizer state is copied unchanged.
    """
    grown: dict[str, Tensor] = {}
    for full, value in tensors.items():
        before, found, after = full.partition("model.layers.")
        if not found:
            grown[full] = value
            continue
        index, rest = after.split(".", 1)
        writes = not before and rest.endswith(("o_proj.weight", "down_proj.weight"))
        for copy in range(factor):
            grown[f"{before}{found}{int(index) * factor + copy}.{rest}"] = (
                value / factor if writes else value.clone()
            )
    return grown
