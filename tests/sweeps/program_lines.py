"""Lines of which random programs are made, as templates for :mod:`tests.sweeps.programs`.

``{v}`` is any tensor of floats, ``{o}`` and ``{p}`` are tensors of its shape and dtype, ``{q}`` is any tensor of its
dtype, ``{d}`` is one of its dimensions with size ``{s}``, ``{n}`` its last size, ``{first}`` its first. ``{w}`` is a
width, ``{c}`` a number, ``{k}`` an index into dimension ``{d}``, ``{half}`` half its size. ``i`` are integers of the
batch. Before ``::`` stands what ``__init__`` makes for the line, under the name ``{m}``.
"""

from __future__ import annotations

from tests.sweeps import in_place_models

POINTWISE = (
    *("torch.sin({v})", "torch.tanh({v})", "{v}.sigmoid()", "-{v}", "{o} * {p}", "{o} + {p}", "{v} - {p}"),
    *("F.gelu({v})", "F.silu({v})", "F.softplus({v})", "F.elu({v})", "F.leaky_relu({v}, 0.1)", "{v}.clamp(-1.0, 1.0)"),
    *("{v}.square()", "torch.exp({v}.clamp(max=1.0))", "{v}.abs().add(0.5).sqrt()", "{v}.abs().add(1.0).log()"),
    *("{v} / ({o}.abs() + 1.0)", "torch.relu({v})", "F.relu6({v})", "torch.lerp({v}, {o}, 0.3)"),
    *("torch.addcmul({v}, {o}, {p}, value=0.5)", "torch.maximum({v}, {o})", "torch.minimum({v}, {p})", "{v}.erf()"),
    *("torch.atan2({v}, {o}.abs() + 0.5)", "F.mish({v})", "{v}.pow(3).clamp(-2.0, 2.0)"),
    *("torch.rsqrt({v}.square() + 1.0)", "F.hardswish({v})", "F.celu({v}, 0.7)", "{v}.cos()"),
    *("{v} * {v}.mean(-1, keepdim=True)", "{v} - {v}.amax({d}, keepdim=True)", "{v} * {c} + 0.1"),
    *("torch.logaddexp({v}, {o})", "{v}.logit(0.01)", "torch.hypot({v}, {o} + 0.1)", "{v}.expm1().clamp(max=2.0)"),
    "F.glu(torch.cat([{v}, {o}], {d}), {d})",
)
CUT = (
    *("torch.where({v} > 0, {o}, {p})", "{v}.masked_fill({o} > 0.5, {c})", "{v}.sort({d}).values"),
    *("{v}.median({d}).values", "{v}.gather({d}, {o}.argsort({d}))", "{v}.topk(max({s} // 2, 1), {d}).values"),
    *("{v} * ({o} > {p})", "{v}.round() + {o}", "torch.zeros_like({v}).scatter_add({d}, {o}.argsort({d}) // 2, {p})"),
    *("{v}.sign() * {o}", "{v}.kthvalue(1, {d}).values", "{v}.scatter({d}, {o}.argsort({d}), {p})"),
    "{v}.scatter_reduce({d}, {o}.argsort({d}) // 2, {p}, 'amax')",
    "torch.take_along_dim({v}, {o}.argmax({d}, keepdim=True), {d})",
    *("{v} * F.one_hot({v}.argmax(-1), {n}).to({v}.dtype)", "{v}.cummax({d}).values", "{v}.floor() * 0.1 + {p}"),
    "torch.bucketize({v}, i.new_tensor([0, 1])).to({v}.dtype) * {o}",
)
"""A small change of what these read may change what they give a lot."""
SHAPES = (
    *("{v}.transpose(0, 1)", "{v}.mT", "{v}.flatten(0, 1)", "{v}.unflatten(-1, (2, -1))", "{v}.unflatten(0, (2, -1))"),
    *("{v}.reshape(-1, {w})", "{v}.reshape({w}, -1)", "{v}.flip({d})", "{v}.roll(1, {d})"),
    *("torch.cat([{v}, {o}], {d})", "torch.stack([{v}, {o}], {d})", "{v}.mean({d})", "{v}.sum({d}) / {s}"),
    *("{v}.amax({d})", "{v}.logsumexp({d})", "{v}.unsqueeze({d}).expand(*{v}.shape[:{d}], 2, *{v}.shape[{d}:]) * 0.7"),
    *("{v}.narrow({d}, 0, {half})", "{v}.permute(-1, *range({v}.dim() - 1))", "{v}.select({d}, {k})", "{v}.std({d})"),
    *("{v}.norm(dim={d})", "{v}.cumsum({d}) / {s}", "{v}.chunk(2, {d})[0]", "{v}.movedim(0, -1)"),
    *("{v}.repeat_interleave(2, {d})", "torch.cat({v}.tensor_split(2, {d})[::-1], {d})", "F.pad({v}, (1, 0))"),
    *("F.pad({v}, (0, -1))", "{v}.contiguous()", "{v}.clone()", "{v}.detach() + {o}", "torch.stack({v}.unbind(0), -1)"),
    *("{v}.diff(dim={d})", "{v}.var({d}, keepdim=True) + {v}", "{v}.as_strided(({s}, 2), (1, 1))"),
    *("{v}.unfold({d}, 2, 1)", "{v}.tril()", "{v}.triu(1) + {o}", "{v}.flatten()[: {half}]"),
    "{v}.prod({d}).clamp(-2.0, 2.0)",
)
INDEXED = (
    *("{v}[i.flatten()[:7] % {first}]", "{v}.index_select({d}, i.flatten()[:{half}] % {s})"),
    *("{v}[..., i.flatten()[:9] % {n}]", "{v}.index_add({d}, i.flatten()[:2] % {s}, {o}.narrow({d}, 0, 2))"),
    *("torch.take({v}, i % {v}.numel())", "{v}.index_fill({d}, i.flatten()[:2] % {s}, {c})"),
    "{v}.index_put((i.flatten()[:3] % {first},), {o}[:3], accumulate=True)",
    "{v}.gather(-1, (i.flatten()[:1] % {n}).expand(*{v}.shape[:-1], 3))",
    "{v}.masked_fill((i.flatten()[0] % 2 == 0), {c}) + {o}",
    "{v}.index_copy({d}, torch.arange(2), {o}.narrow({d}, 0, 2))",
    "{v}.slice_scatter({o}.narrow({d}, 0, {half}), {d}, 0, {half})",
    *("torch.where(i.flatten()[:1] % 2 == 0, {v}, {o})", "{v}.select_scatter({o}.select({d}, {k}), {d}, {k})"),
    *("{v}[i[:2, 0] % {first}] * 0.5", "self.{m} = nn.Embedding(96, {w}) :: self.{m}(i)"),
    "self.{m} = nn.Embedding(96, {w}, padding_idx=0) :: self.{m}(i[:, 1:])",
    "self.{m} = nn.EmbeddingBag(96, {w}, mode='mean') :: self.{m}(i)",
    "self.{m} = nn.Parameter(torch.randn(96, {n})) :: {v} + self.{m}[i.flatten()[:1] % 96]",
)
PRODUCTS = (
    "self.{m} = nn.Linear({n}, {w}) :: self.{m}({v}.float())",
    "self.{m} = nn.Linear({n}, {n}, bias=False) :: {v} + self.{m}({v}.float())",
    "self.{m} = nn.Linear({n}, {w}) :: self.{m}({v}.float())",
    *("self.{m} = nn.Linear({n}, {w}) :: F.linear({v}.float(), self.{m}.weight)", "{v} @ {o}.mT / {n}"),
    *("{v}.mT @ {o} / {v}.shape[-2]", "torch.bmm({v}.flatten(0, -3), {o}.flatten(0, -3).mT) / {n}"),
    *("torch.outer({v}.flatten()[:30], {o}.flatten()[:40])", "torch.einsum('...ij,...kj->...ki', {v}, {o}) / {n}"),
    "self.{m} = nn.Parameter(torch.randn({n}, {w}) / {n}) :: {v} @ self.{m}.to({v}.dtype)",
    "({v} * {o}).sum(-1, keepdim=True) * {p}",
    (
        "torch.baddbmm({v}, {o}.mT @ {p} / {s}, {o}.mT @ {p} / {s}) if {v}.dim() == 3 and {v}.shape[-1] == "
        "{v}.shape[-2] else {v} * 0.5"
    ),
    "torch.addmm({q}, {v}, {o}.mT, alpha=0.1)",
    "self.{m} = nn.Parameter(torch.randn({n}) * 0.3) :: {v} * self.{m}.to({v}.dtype)",
    "self.{m} = nn.Bilinear({n}, {n}, 5) :: self.{m}({v}.float(), {o}.float())",
)
NORMS = (
    *("self.{m} = nn.LayerNorm({n}) :: self.{m}({v}.float())", "self.{m} = nn.RMSNorm({n}) :: self.{m}({v}.float())"),
    *("F.layer_norm({v}, ({n},))", "self.{m} = nn.GroupNorm(2, {v.shape[1]}) :: self.{m}({v}.float())"),
    *("torch.softmax({v}, {d})", "F.log_softmax({v}, -1).clamp(min=-5.0)", "F.normalize({v}, dim={d})"),
    *("F.instance_norm({v}.float())", "F.rms_norm({v}, ({n},))", "F.group_norm({v}, 1)"),
    "{v} / ({v}.norm(dim=-1, keepdim=True) + 1.0)",
)
STATE = (
    "self.{m} = nn.BatchNorm1d({n}) :: self.{m}({v}.float().reshape(-1, {n})).reshape({v}.shape)",
    "self.{m} = nn.BatchNorm2d({v.shape[1]}) :: self.{m}({v}.float())",
    "self.{m} = nn.BatchNorm1d({v.shape[1]}, affine=False) :: self.{m}({v}.float())",
    (
        "self.register_buffer('{m}', torch.zeros({n})) :: {v} - self.{m}\nwith torch.no_grad():\n    "
        "self.{m}.mul_(0.9).add_({v}.detach().float().reshape(-1, {n}).mean(0), alpha=0.1)"
    ),
)
"""What these keep in buffers is updated twice in a checkpointed part in eager, once under torch.compile."""
DROPOUTS = (
    *("F.dropout({v}, 0.5, self.training)", "F.dropout({v}, 0.1)", "F.dropout1d({v}, 0.2)"),
    *("F.alpha_dropout({v}, 0.1, True)", "F.dropout(torch.relu({v}), 0.25)"),
    *("self.{m} = nn.Dropout(0.2) :: self.{m}({v})", "{v} + torch.randn_like({v}) * 0.1", "{v} * torch.rand_like({v})"),
    *("{v} * torch.bernoulli({o}.detach().sigmoid())", "F.rrelu({v}, training=True)"),
)
CONVOLUTIONS = (
    "self.{m} = nn.Conv1d({v.shape[1]}, {w}, 3, padding=1) :: self.{m}({v}.float())",
    "self.{m} = nn.Conv2d({v.shape[1]}, 8, 3, padding=1) :: self.{m}({v}.float())",
    "self.{m} = nn.Conv2d({v.shape[1]}, {v.shape[1]}, 3, groups={v.shape[1]}) :: self.{m}({v}.float())",
    "self.{m} = nn.Conv2d({v.shape[1]}, 12, 2, stride=2, bias=False) :: self.{m}({v}.float())",
    "self.{m} = nn.ConvTranspose2d({v.shape[1]}, 4, 2, stride=2) :: self.{m}({v}.float())",
    *("self.{m} = nn.Conv1d({v.shape[1]}, {w}, 1) :: self.{m}({v}.float())", "F.max_pool2d({v}, 2)"),
    *("F.avg_pool2d({v}, 2)", "F.adaptive_avg_pool2d({v}, (3, 2))", "F.avg_pool1d({v}, 2)"),
    *("F.max_pool1d({v}, 3, stride=1, padding=1)", "F.pixel_shuffle({v}, 2)", "F.unfold({v}, 3)"),
    *("F.interpolate({v}, scale_factor=2, mode='nearest')", "F.adaptive_max_pool1d({v}, 4)"),
    "F.pad({v}, (1, 1), mode='reflect')",
    "self.{m} = nn.Conv1d({v.shape[1]}, {w}, 5, dilation=2) :: self.{m}({v}.float())",
    "self.{m} = nn.Conv2d(1, 4, 3, padding=1) :: self.{m}({v}.float().unsqueeze(1))",
    *("{v}.contiguous(memory_format=torch.channels_last) * 1.5", "F.lp_pool1d({v}.abs() + 0.1, 2, 2)"),
)
ATTENTION = (
    *("F.scaled_dot_product_attention({v}, {o}, {p})", "F.scaled_dot_product_attention({v}, {o}, {p}, is_causal=True)"),
    "F.scaled_dot_product_attention({v}, {v}, {o}, dropout_p=0.2)",
    (
        "self.{m} = nn.Linear({n}, 3 * {n}) :: F.scaled_dot_product_attention(*(t.unflatten(-1, (2, "
        "-1)).transpose(1, 2) for t in self.{m}({v}.float()).chunk(3, -1)), is_causal=True).transpose(1, "
        "2).flatten(2)"
    ),
    (
        "F.scaled_dot_product_attention({v}, {o}, {p}, attn_mask=torch.ones({v.shape[-2]}, {v.shape[-2]}, "
        "dtype=torch.bool).tril())"
    ),
    (
        "self.{m} = nn.MultiheadAttention({n}, 2, batch_first=True) :: self.{m}({v}.float(), {v}.float(), "
        "{o}.float(), need_weights=False)[0]"
    ),
    (
        "(({v} @ {o}.mT) * {n} ** -0.5).masked_fill(torch.ones({v.shape[-2]}, {v.shape[-2]}, "
        "dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ {p}"
    ),
    "self.{m} = nn.TransformerEncoderLayer({n}, 2, 32, batch_first=True) :: self.{m}({v}.float())",
)
DTYPES = (
    *("{v}.to(torch.bfloat16)", "{v}.double()", "{v}.float()", "{v}.float()", "{v}.half()"),
    "{v}.float() + {v}.detach().to(torch.int32)",
)
FUNCTIONS = (*("Rounded.apply({v}) + {o}", "Kept.apply({v}, {o})", "sum(Two.apply({v}))", "Scaled.apply({v}, {c})"),)
"""Of custom functions, see ``PRELUDE`` of :mod:`tests.sweeps.programs`."""
WRITES = tuple(line for line in in_place_models.WRITES if "self" not in line and "F.dropout" not in line)
LOSSES = (
    *("{v}.square().mean()", "F.smooth_l1_loss({v}, torch.zeros_like({v}))"),
    *("F.huber_loss({v}, torch.ones_like({v}), delta=0.5)", "F.mse_loss({v}, y.mean().expand({v}.shape))"),
    "F.cross_entropy({v}.reshape(-1, {n}), torch.arange({rows}) % {n})",
    "F.cross_entropy({v}.reshape(-1, {n}), torch.arange({rows}) % {n}, label_smoothing=0.1)",
    "F.nll_loss(F.log_softmax({v}.reshape(-1, {n}), -1), torch.arange({rows}) % {n}, ignore_index=0)",
    "F.binary_cross_entropy_with_logits({v}, torch.rand({v}.shape))",
    "F.binary_cross_entropy({v}.sigmoid(), torch.full({v}.shape, 0.3))",
    "F.kl_div({v}.log_softmax(-1), torch.full({v}.shape, 1 / {n}), reduction='batchmean')",
    *("{v}.logsumexp(-1).mean()", "F.l1_loss({v}, torch.full({v}.shape, 0.2))"),
    *("F.soft_margin_loss({v}, torch.ones({v}.shape))", "{v}.norm() * 0.1", "{v}.var()"),
    "(1 - F.cosine_similarity({v}, torch.ones({v}.shape), -1)).mean()",
    "F.hinge_embedding_loss({v}, torch.ones({v}.shape))",
    "F.multilabel_soft_margin_loss({v}.reshape(-1, {n}), torch.ones({rows}, {n}))",
    "F.poisson_nll_loss({v}.clamp(max=2.0), torch.ones({v}.shape))",
    "F.triplet_margin_loss({v}, {v}.flip(0), torch.zeros({v}.shape))",
    "F.margin_ranking_loss({v}.flatten(), torch.zeros({v}.numel()), torch.ones({v}.numel()))",
    "F.multi_margin_loss({v}.reshape(-1, {n}), torch.arange({rows}) % {n})",
)
"""Each of one output, as float32."""
