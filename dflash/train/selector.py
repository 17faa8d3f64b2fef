"""Training a DFlash2 draft's own parts: where they start, and tables that learn from little text.

A codebook has a row a token, and most tokens are rare. So a row is the token's embedding through a
small matrix, which all tokens train, plus a part of its own; what is served is their sum. The sizes
that DFlash2's authors report fit the matrices, not the tables: they seem to have done the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import CandidateSelector, ConvLayer, DFlash2DraftModel
from dflash.drafts.spec import DraftSpec
from dflash.train import losses
from dflash.train.blocks import Blocks


class FactoredSelector(CandidateSelector):
    """A selector whose codebook rows are ``own row + embedding row @ map``."""

    def __init__(self, spec: DraftSpec, embedding: Tensor) -> None:
        """``embedding`` [V, H] is the target's; its rows are scaled to a norm of about one."""
        super().__init__(spec)
        rank, width = self.predecessor_codebook.shape[1], embedding.shape[1]
        table = embedding.detach().float()
        self._table = (table / table.norm(dim=-1).mean().clamp(min=1e-6),)  # no weight of its own
        self.predecessor_map = nn.Parameter(torch.empty(width, rank))
        self.successor_map = nn.Parameter(torch.empty(width, rank))

    def predecessors(self, ids: Tensor) -> Tensor:
        """[..] to [.., r]."""
        return self._rows(self.predecessor_codebook, self.predecessor_map, ids)

    def successors(self, ids: Tensor) -> Tensor:
        """[..] to [.., r]."""
        return self._rows(self.successor_codebook, self.successor_map, ids)

    def _rows(self, own: Tensor, matrix: Tensor, ids: Tensor) -> Tensor:
        rows: Tensor = own[ids] + self._table[0][ids] @ matrix
        return rows

    def codebooks(self) -> dict[str, Tensor]:
        """What is served, by name."""
        every = torch.arange(self.predecessor_codebook.shape[0])
        return {
            "predecessor_codebook": self.predecessors(every).detach(),
            "successor_codebook": self.successors(every).detach(),
        }


@torch.no_grad()
def start_dflash2(model: DFlash2DraftModel, embedding: Tensor, generator: torch.Generator) -> None:
    """Let the draft begin as the DFlash v1 draft it contains: convolutions that pass their input
    on, a selector that adds nothing."""
    for layer in model.layers:
        assert isinstance(layer, ConvLayer)
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel.zero_()
            conv.base_kernel[:, 0] = 1.0
            conv.kernel_projection.weight.zero_()
    selector = FactoredSelector(model.spec, embedding).to(model.norm.weight)
    nn.init.normal_(selector.hidden_projection.weight, std=0.02, generator=generator)
    nn.init.normal_(selector.predecessor_map, generator=generator)
    for parameter in (
        selector.predecessor_codebook,
        selector.successor_codebook,
        selector.successor_map,
    ):
        nn.init.zeros_(parameter)
    model.candidate_selector = selector


def selector_term(
    model: DFlash2DraftModel,
    states: Tensor,  # [n, K, H]
    logits: Tensor,  # [n, K, kept]
    block: Blocks,
    tokens: losses.FrequentTokens,
    weights: Tensor | None,
) -> losses.Selected:
    """The second term of the objective: each label among its row's candidates, the label before
    it given."""
    labels = block.labels.flatten(0, 1).to(states.device)
    anchors = block.inputs.reshape(-1, block.size)[:, :1].to(states.device)
    before = torch.cat((anchors, labels[:, :-1]), dim=1)
    selector = model.candidate_selector
    unary, places = logits.topk(min(selector.top_k, logits.shape[-1]), dim=-1)
    ids = tokens.kept.to(places.device)[places]
    gained = selector.transitions(
        states.flatten(0, 1), before.reshape(-1, 1), ids.flatten(0, 1)
    ).reshape(unary.shape)
    return losses.selector_loss(
        unary.float() + gained,
        places,
        tokens.index.to(labels.device)[labels],
        block.valid.flatten(0, 1).to(labels.device),
        weights,
    )


def served(model: DFlashDraftModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names and in the form in which a draft is loaded."""
    selector = getattr(model, "candidate_selector", None)
    tables = selector.codebooks() if isinstance(selector, FactoredSelector) else {}
    for name, parameter in model.named_parameters():
        last = name.rpartition(".")[2]
        if last not in ("predecessor_map", "successor_map"):
            yield name, tables.get(last, parameter.detach())
