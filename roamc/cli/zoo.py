"""Built-in models by name, to plan without any code: ``roamc plan gpt2-xl --batch 4``.

``gpt`` is written out here. The others are built from their configurations if transformers is installed:
random weights, nothing is downloaded, and on the meta device not even allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roamc.capture.step_trace import LossFunction
from roamc.cli.models import DTYPE_NAMES, MODELS, Settings, checked
from roamc.errors import OptionError
from roamc.frontends.workload import Workload
from roamc.settings import EMBEDDING

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True)
class Recipe:
    """How to build one model.

    Attributes:
        build: makes the model from settings, on torch's default device.
        batch: makes the batch from settings: the arguments of ``loss`` behind the model.
        loss: function of the model and the tensors of the batch that returns the loss, a scalar.
        tp_plan: pattern of layers' names to how a mesh splits them, see :mod:`roamc.capture.tensor_parallel`; empty
            where the model brings its own or has none.
    """

    build: Callable[[Settings], nn.Module]
    batch: Callable[[Settings], tuple[Tensor, ...]]
    loss: LossFunction
    tp_plan: Mapping[str, str] = field(default_factory=dict)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention.

    Args:
        width: width of the residual stream, a multiple of ``heads``.
        heads: number of attention heads.
        dropout: probability of dropout, in attention and behind both halves.
        fused_attention: whether attention is one operator; else softmax and its dropout are values of their own.
    """

    def __init__(self, width: int, heads: int, dropout: float, fused_attention: bool = True) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.dropout, self.fused_attention = dropout, fused_attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the block's result for ``x`` of shape (batch, seq, width), in the same shape.

        Args:
            x: the residual stream.
            hidden: bool (seq, seq), for each place the places that it does not see; for attention that is not fused.
        """
        x = x + self.drop(self.proj(self._attend(self.norm1(x), hidden)))
        result: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return result

    def _attend(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        batch, seq, _ = x.shape
        query, key, value = (
            part.view(batch, seq, -1, self.head_width).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        mixed = self._core(query, key, value, hidden)
        return mixed.transpose(1, 2).contiguous().view(batch, seq, -1)

    def _core(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if self.fused_attention:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        assert hidden is not None
        scores = (query @ key.transpose(2, 3) * self.head_width**-0.5).masked_fill(hidden, -torch.inf)
        return F.dropout(scores.softmax(-1), dropout) @ value


class GPT(nn.Module):
    """A decoder-only language model after nanoGPT: learned positions, pre-norm blocks, a head.

    Args:
        layers: number of blocks.
        width: width of the residual stream, a multiple of ``heads``.
        heads: number of attention heads of a block.
        vocab: number of different tokens.
        seq: length of the longest sequence.
        dropout: probability of dropout.
        tied: whether the head has the weight of the token embedding.
        fused_attention: as for :class:`Block`.
        embedding: whether it has its embeddings; the first stage of a pipeline alone has them.
        head: whether it has a head; the last stage of a pipeline alone has one.

    Raises:
        OptionError: ``width`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        vocab: int,
        seq: int,
        dropout: float = 0.0,
        tied: bool = True,
        fused_attention: bool = True,
        embedding: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise OptionError(f"width {width} is not a multiple of heads {heads}")
        self.tokens = nn.Embedding(vocab, width) if embedding else None
        self.places = nn.Embedding(seq, width) if embedding else None
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, fused_attention) for _ in range(layers))
        self.hidden: Tensor | None
        hidden = None if fused_attention else torch.ones(seq, seq, dtype=torch.bool).triu(1)
        self.register_buffer("hidden", hidden, persistent=False)
        self.norm = nn.LayerNorm(width) if head else None
        self.head = nn.Linear(width, vocab, bias=False) if head else None
        if tied and self.head is not None and self.tokens is not None:
            self.head.weight = self.tokens.weight
        self.apply(_init)

    def forward(self, idx: Tensor) -> Tensor:
        """Return logits (batch, seq, vocab) for the token numbers ``idx``, int64 of shape (batch, seq).

        Without a head the result is the residual stream, (batch, seq, width); without embeddings ``idx`` is.
        """
        x = idx
        if self.tokens is not None and self.places is not None:
            x = self.drop(self.tokens(idx) + self.places.weight[: idx.shape[1]])
        for block in self.blocks:
            x = block(x, self.hidden)
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(name: str, settings: Settings | None = None, device: str = "meta") -> Workload:
    """Build one model of :data:`roamc.cli.models.MODELS` in training mode, with its batch and loss, and no optimizer.

    Args:
        name: key of :data:`roamc.cli.models.MODELS`.
        settings: settings that replace defaults of the recipe.
        device: "meta" to plan only; weights and batch then take no memory.

    Raises:
        OptionError: unknown model or setting (names the nearest), a value out of range, or transformers is missing.
    """
    chosen = checked(name, settings or {})
    recipe, dtype = RECIPES[name], DTYPES[str(chosen["dtype"])]
    with torch.device(device):
        model = recipe.build(chosen).to(dtype).train()
        batch = tuple(_in(item, dtype) for item in recipe.batch(chosen))
    return Workload(name, model, batch, recipe.loss, tp_plan=recipe.tp_plan)


def _in(item: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the batch, in ``dtype`` if it has floating-point numbers; a leaf of autograd."""
    if not item.is_floating_point():
        return item
    return item.detach().to(dtype).requires_grad_(item.requires_grad)


def text_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of ``model(tokens)``, logits (batch, seq, vocab), against ``targets`` (batch, seq).

    ``tokens`` and ``targets`` are token numbers, int64. The loss is a float32 scalar.
    """
    logits: Tensor = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _stage_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """As :func:`text_loss`; of a stage without a head the sum of what it hands on: a gradient comes from outside."""
    result: Tensor = model(tokens).sum() if getattr(model, "head", None) is None else text_loss(model, tokens, targets)
    return result


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _gpt(settings: Settings) -> nn.Module:
    sizes: dict[str, Any] = {key: value for key, value in settings.items() if key not in ("batch", "dtype")}
    return GPT(**sizes)


def _text_batch(settings: Settings) -> tuple[Tensor, ...]:
    shape = (int(settings["batch"]), int(settings["seq"]))
    return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)


def _stage_batch(settings: Settings) -> tuple[Tensor, ...]:
    """As :func:`_text_batch`; without embeddings what the stage before hands on, which gets its gradient back."""
    tokens, targets = _text_batch(settings)
    if settings[EMBEDDING]:
        return tokens, targets
    return torch.zeros(*tokens.shape, int(settings["width"])).requires_grad_(), targets


def _image_batch(settings: Settings) -> tuple[Tensor, ...]:
    count, side = int(settings["batch"]), int(settings["image"])
    return torch.zeros(count, 3, side, side), torch.zeros(count, dtype=torch.long)


@dataclass(frozen=True)
class _Pretrained:
    """Builds a model of transformers from settings.

    config, model: names of its two classes. fields: maps a setting to the field of the configuration. fixed: fields
    with fixed values.
    """

    config: str
    model: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]

    def __call__(self, settings: Settings) -> nn.Module:
        transformers = transformers_of("this model", "; gpt does without")
        values = {field: settings[key] for key, field in self.fields.items()}
        config = getattr(transformers, self.config)(**values, **self.fixed)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model


def transformers_of(what: str, advice: str = "") -> Any:
    """Return the module transformers.

    Raises:
        OptionError: it is missing: ``what`` needs it, and ``advice`` says what does without.
    """
    try:
        import transformers
    except ImportError:
        raise OptionError(f"{what} needs transformers: pip install 'transformers>=5,<6'{advice}") from None
    return transformers


def _logits_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _translation_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, decoder_input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _image_loss(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    logits: Tensor = model(pixel_values=pixels).logits
    return F.cross_entropy(logits.float(), labels)


_GPT2_FIELDS = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size", "seq": "n_positions"}
_BERT_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
_TEXT_FIELDS = {"vocab": "vocab_size", "seq": "max_position_embeddings"}
_T5_FIELDS = {
    "layers": "num_layers", "width": "d_model", "heads": "num_heads", "head_width": "d_kv", "hidden": "d_ff",
    "vocab": "vocab_size",
}  # fmt: skip

_GPT2 = _Pretrained("GPT2Config", "GPT2LMHeadModel", _GPT2_FIELDS, {"use_cache": False})
_BERT = _Pretrained("BertConfig", "BertForMaskedLM", {**_BERT_FIELDS, **_TEXT_FIELDS}, {})
_LLAMA = _Pretrained(
    "LlamaConfig", "LlamaForCausalLM", {**_BERT_FIELDS, **_TEXT_FIELDS, "kv_heads": "num_key_value_heads"},
    {"use_cache": False},
)  # fmt: skip
_T5 = _Pretrained("T5Config", "T5ForConditionalGeneration", _T5_FIELDS, {"use_cache": False})
_VIT = _Pretrained(
    "ViTConfig", "ViTForImageClassification",
    {**_BERT_FIELDS, "image": "image_size", "patch": "patch_size", "classes": "num_labels"}, {},
)  # fmt: skip
_RESNET = _Pretrained("ResNetConfig", "ResNetForImageClassification", {"classes": "num_labels"}, {})
_MOBILENET = _Pretrained(
    "MobileNetV2Config", "MobileNetV2ForImageClassification", {"image": "image_size", "classes": "num_labels"}, {}
)


_BLOCK_PLAN = {
    "blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
}  # fmt: skip
_BERT_PLAN = {
    **{f"bert.encoder.layer.*.attention.self.{part}": "colwise" for part in ("query", "key", "value")},
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(
        ("gpt", *(name for name in MODELS if name.startswith("gpt3-"))),
        Recipe(_gpt, _stage_batch, _stage_loss, _BLOCK_PLAN),
    ),
    **dict.fromkeys(("gpt2", "gpt2-xl"), Recipe(_GPT2, _text_batch, _logits_loss)),
    "bert": Recipe(_BERT, _text_batch, _logits_loss, _BERT_PLAN),
    "llama": Recipe(_LLAMA, _text_batch, _logits_loss),
    "t5": Recipe(_T5, _text_batch, _translation_loss),
    "vit": Recipe(_VIT, _image_batch, _image_loss),
    "resnet50": Recipe(_RESNET, _image_batch, _image_loss),
    "mobilenetv2": Recipe(_MOBILENET, _image_batch, _image_loss),
    **dict.fromkeys(
        (name for name in MODELS if name.startswith("gpt3-")), Recipe(_gpt, _stage_batch, _stage_loss, _BLOCK_PLAN)
    ),
}
"""Name of each of :data:`roamc.cli.models.MODELS` to its recipe."""
