"""Joint graphs in the styles of torch 2.1, 2.5 and 2.8, written by hand: a layer, and what is new in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from roamc.capture.dump import files, graphs
from roamc.graph import Phase, Role
from roamc.graph.memory import input_bytes
from roamc.graph.origin import source_line
from roamc.options import parse_options
from roamc.planning import search

OF_2_1 = """\
[2023-10-04 09:15:02,113] [0/1] torch._functorch.aot_autograd.__aot_joint_graph: [INFO] TRACED GRAPH
[2023-10-04 09:15:02,113] [0/1] torch._functorch.aot_autograd.__aot_joint_graph: [INFO]  ===== Joint graph 0 =====
 <eval_with_key>.4 class joint_helper(torch.nn.Module):
    def forward(self, primals, tangents):
        primals_1: f32[16, 16]; primals_2: f32[16]; primals_3: Sym(s0); primals_4: f32[s0, 16]; tangents_1: f32[s0, 16];

        primals_1, primals_2, primals_3, primals_4, tangents_1, = \
fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
        # File: net.py:7, code: return torch.tanh(self.layer(x))
        t: f32[16, 16] = torch.ops.aten.t.default(primals_1);  primals_1 = None
        addmm: f32[s0, 16] = torch.ops.aten.addmm.default(primals_2, primals_4, t);  primals_2 = None
        tanh: f32[s0, 16] = torch.ops.aten.tanh.default(addmm);  addmm = None
        detach: f32[s0, 16] = torch.ops.aten.detach.default(tanh)
        detach_1: f32[s0, 16] = torch.ops.aten.detach.default(detach);  detach = None
        tanh_backward: f32[s0, 16] = torch.ops.aten.tanh_backward.default(tangents_1, detach_1);  detach_1 = None
        t_1: f32[16, 16] = torch.ops.aten.t.default(t);  t = None
        mm: f32[s0, 16] = torch.ops.aten.mm.default(tanh_backward, t_1);  t_1 = None
        t_2: f32[16, s0] = torch.ops.aten.t.default(tanh_backward)
        mm_1: f32[16, 16] = torch.ops.aten.mm.default(t_2, primals_4);  t_2 = primals_4 = None
        t_3: f32[16, 16] = torch.ops.aten.t.default(mm_1);  mm_1 = None
        sum_1: f32[1, 16] = torch.ops.aten.sum.dim_IntList(tanh_backward, [0], True);  tanh_backward = None
        view: f32[16] = torch.ops.aten.view.default(sum_1, [16]);  sum_1 = None
        t_4: f32[16, 16] = torch.ops.aten.t.default(t_3);  t_3 = None
        return pytree.tree_unflatten([tanh, t_4, view, None, mm], self._out_spec)
"""

OF_2_5 = """\
I1009 10:02:11.402000 91 torch/_functorch/_aot_autograd/dispatch_and_compile_graph.py:215] [0/0] [__aot_joint_graph] \
TRACED GRAPH
 ===== Joint graph 0 =====
 <eval_with_key>.1 from /usr/lib/torch/fx/proxy_tensor.py:1258 in wrapped class joint_helper(torch.nn.Module):
    def forward(self, primals, tangents):
        primals_1: "f32[16, 16][16, 1]cuda:0"; primals_2: "f32[16][1]cuda:0"; primals_3: "f32[8, 16][16, 1]cuda:0"; \
tangents_1: "f32[8, 16][16, 1]cuda:0";

        primals_1, primals_2, primals_3, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
         # File: net.py:7 in forward, code: return torch.relu(self.layer(x))
        t: "f32[16, 16][1, 16]cuda:0" = torch.ops.aten.t.default(primals_1);  primals_1 = None
        addmm: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.addmm.default(primals_2, primals_3, t);  primals_2 = t = None
        relu: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.relu.default(addmm);  addmm = None
        detach: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.detach.default(relu)
        detach_1: "f32[8, 16][16, 1]cuda:0" = torch.ops.aten.detach.default(detach);  detach = None
        threshold_backward: "f32[8, 16][16, 1]cuda:0" = \
torch.ops.aten.threshold_backward.default(tangents_1, detach_1, 0);  tangents_1 = detach_1 = None
        t_1: "f32[16, 8][1, 16]cuda:0" = torch.ops.aten.t.default(threshold_backward)
        mm: "f32[16, 16][16, 1]cuda:0" = torch.ops.aten.mm.default(t_1, primals_3);  t_1 = primals_3 = None
        t_2: "f32[16, 16][1, 16]cuda:0" = torch.ops.aten.t.default(mm);  mm = None
        sum_1: "f32[1, 16][16, 1]cuda:0" = torch.ops.aten.sum.dim_IntList(threshold_backward, [0], True)
        view: "f32[16][1]cuda:0" = torch.ops.aten.view.default(sum_1, [16]);  sum_1 = None
        t_3: "f32[16, 16][16, 1]cuda:0" = torch.ops.aten.t.default(t_2);  t_2 = None
        return pytree.tree_unflatten([relu, t_3, view, None], self._out_spec)
"""

OF_2_8 = """\
[rank0]:I0806 17:40:55.009000 4 torch/_functorch/_aot_autograd/graph_compile.py:183] [0/0] [__aot_joint_graph] \
TRACED GRAPH
 /usr/lib/python3/torch/fx/_lazy_graph_module.py class joint_fn(torch.nn.Module):
    def forward(self, primals, tangents):
        primals_1: "bf16[16, 16][16, 1]cpu";  primals_2: "bf16[8, 16][16, 1]cpu";  primals_3: "i64[][]cpu";  \
tangents_1: "bf16[8, 16][16, 1]cpu";

        primals_1, primals_2, primals_3, tangents_1, = fx_pytree.tree_flatten_spec([primals, tangents], self._in_spec)
        # File: net.py:9 in forward, code: self.calls += 1
        add: "i64[][]cpu" = torch.ops.aten.add.Tensor(primals_3, 1)
        # File: net.py:10 in forward, code: return F.dropout(x @ self.w, 0.1)
        mm: "bf16[8, 16][16, 1]cpu" = torch.ops.aten.mm.default(primals_2, primals_1);  primals_1 = None
        native_dropout = torch.ops.aten.native_dropout.default(mm, 0.1, True);  mm = None
        getitem: "bf16[8, 16][16, 1]cpu" = native_dropout[0]
        getitem_1: "b8[8, 16][16, 1]cpu" = native_dropout[1];  native_dropout = None
        native_dropout_backward: "bf16[8, 16][16, 1]cpu" = \
torch.ops.aten.native_dropout_backward.default(tangents_1, getitem_1, 1.1111111111111112);  getitem_1 = None
        t: "bf16[16, 8][1, 16]cpu" = torch.ops.aten.t.default(primals_2);  primals_2 = None
        mm_1: "bf16[16, 16][16, 1]cpu" = torch.ops.aten.mm.default(t, native_dropout_backward);  t = None
        # No stacktrace found for following nodes
        copy_: "i64[][]cpu" = torch.ops.aten.copy_.default(primals_3, add);  primals_3 = add = copy_ = None
        return pytree.tree_unflatten([getitem, mm_1, None, None], self._out_spec)
"""

VERSIONS = {
    "2.1": (OF_2_1, {"s0": 8}, 10, "net.py:7", 512 + 1024 + 64),
    "2.5": (OF_2_5, {}, 8, "net.py:7", 512 + 1024 + 64),
    "2.8": (OF_2_8, {}, 3, "net.py:10", 256 + 512 + 8),
}
"""A text, values of its sizes, how many operators are backward's, the line of its product, and bytes of its inputs."""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version: str, tmp_path: Path) -> None:
    text, sizes, backward, line, held = VERSIONS[version]
    file = tmp_path / "graph.txt"
    file.write_text(text, "utf-8")
    (dump,) = files.read(str(file))
    assert dump.first.name.startswith("joint_")
    graph = graphs.train_graph(dump, "graph", sizes)
    assert list(graph.phase.values()).count(Phase.BACKWARD) == backward
    assert sum(port.role is Role.TANGENT for port in graph.inputs) == 1
    assert sum(input_bytes(graph).values()) == held
    product = next(node for node in graph.graph.nodes if "mm" in node.name)
    assert source_line(product) == line
    assert not any("differ" in note or "estimated" in note for note in graph.notes)
    plan = search.run(graph, parse_options({})).plan
    assert plan.device == ("cuda" if "cuda" in text else "cpu")
    assert plan.peak_bytes >= held // 2


def test_graphs_of_several_versions_in_one_text_are_all_found(tmp_path: Path) -> None:
    file = tmp_path / "graphs.txt"
    file.write_text("\n".join(text for text, *_ in VERSIONS.values()), "utf-8")
    assert len(files.read(str(file))) == len(VERSIONS)
