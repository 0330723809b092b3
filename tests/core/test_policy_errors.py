# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every mistake a policy file can hold is refused at its line and column, with the nearest valid word."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.policy.known import Known

#: What is wrong: (the policy's text, line:column, a part of the message).
MISTAKES: dict[str, tuple[str, str, str]] = {
    # structure
    "empty": ("", "1:1", "the policy is empty"),
    "only a comment": ("# nothing\n", "1:1", "the policy is empty"),
    "a list": ("- version: 1\n", "1:1", "a policy is a mapping, got a list"),
    "a word": ("version\n", "1:1", "a policy is a mapping, got a word"),
    "not YAML": ("version: 1\nprefer: [torch\n", "3:1", "not readable as YAML"),
    "tab": ("version: 1\nrules:\n\t- op: gemm\n", "3:1", "not readable as YAML"),
    "control character": ("version: 1\ndescription: a\x07\n", "2:15", "the character U+0007 is not allowed"),
    "two documents": ("version: 1\n---\nversion: 1\n", "2:1", "not readable as YAML"),
    "duplicate key": (
        "version: 1\ndeny: [torch]\ndeny: []\n",
        "3:1",
        "the key 'deny' is given twice; the first is on line 2",
    ),
    "duplicate key in a rule": ("version: 1\nrules:\n- op: gemm\n  op: gemm\n", "4:3", "'op' is given twice"),
    "key that is a number": ("version: 1\n2: x\n", "2:1", "a key must be a word, got '2'"),
    "key that is a list": ("version: 1\n[a]: x\n", "2:1", "a key must be a word, got a sequence"),
    "tag on a scalar": ("version: 1\ndescription: !!python/name:os.system x\n", "2:14", "would construct an object"),
    "tag on a list": ("version: 1\nprefer: !!python/tuple [torch]\n", "2:9", "tag !!python/tuple would construct"),
    "tag on a mapping": ("version: 1\nnumerics: !thing {}\n", "2:11", "the tag !thing would construct an object"),
    "timestamp tag": ("version: 1\ndescription: !!timestamp 2001-01-01\n", "2:14", "!!timestamp would construct"),
    "unreadable integer": ("version: !!int x\n", "1:10", "cannot read 'x' as int"),
    "alias": ("version: 1\nprefer: &p [torch]\nallow: *p\n", "3:8", "aliases are not accepted"),
    "alias of itself": ("version: 1\nprefer: &p [*p]\n", "2:13", "aliases are not accepted"),
    "deep nesting": ("version: 1\nprefer: " + "[" * 40 + "]" * 40 + "\n", "2:29", "nested too deeply"),
    "abysmal nesting": ("[" * 30000 + "]" * 30000, "1:1", "nested too deeply"),
    # keys and types
    "unknown key": ("version: 1\nprefre: [torch]\n", "2:1", "unknown key 'prefre'; did you mean 'prefer'?"),
    "unknown key in a rule": ("version: 1\nrules:\n- op: gemm\n  wen: {}\n", "4:3", "'wen'; did you mean 'when'?"),
    "unknown numeric": ("version: 1\nnumerics:\n  determinstic: true\n", "3:3", "did you mean 'deterministic'?"),
    "merge key": ("version: 1\n<<: {deny: [torch]}\n", "2:1", "unknown key '<<'"),
    "no version": ("deny: [torch]\n", "1:1", "the key 'version' is missing"),
    "another version": ("version: 2\n", "1:10", "version: expected 1, got 2"),
    "version is true": ("version: true\n", "1:10", "version: expected a whole number, got true"),
    "version is a word": ("version: '1'\n", "1:10", "version: expected a whole number, got the word '1'"),
    "rule without op": ("version: 1\nrules:\n- prefer: [torch]\n", "3:3", "the key 'op' is missing"),
    "prefer is a word": ("version: 1\nprefer: torch\n", "2:9", "prefer: expected a list, got the word 'torch'"),
    "allow is nothing": ("version: 1\nallow:\n", "2:7", "allow: expected a list, got nothing"),
    "entry is a number": ("version: 1\nprefer:\n  - torch\n  - 3\n", "4:5", "expected a word, got the number 3"),
    "rules is a mapping": ("version: 1\nrules: {op: gemm}\n", "2:8", "rules: expected a list, got a mapping"),
    "deterministic is yes": (
        "version: 1\nnumerics: {deterministic: yes}\n",
        "2:27",
        "expected true or false, got the word 'yes'",
    ),
    "deterministic is 1": (
        "version: 1\nnumerics: {deterministic: 1}\n",
        "2:27",
        "expected true or false, got the number 1",
    ),
    "portability": ("version: 1\nnumerics: {fp8_portability: comon}\n", "2:29", "got 'comon'; did you mean 'common'?"),
    "empty require": ("version: 1\nrequire: []\n", "2:10", "require: expected at least one entry"),
    "mapping in when": (
        "version: 1\nrules:\n- op: gemm\n  when: {layout: TN, k: {a: 1}}\n  prefer: [torch]\n",
        "4:25",
        "k: expected true or false or",
    ),
    "list in a list in when": ("version: 1\nrules:\n- op: gemm\n  when: {k: [1, [2]]}\n", "4:17", "got a list"),
    # words
    "unknown backend": ("version: 1\nprefer: [native, trition]\n", "2:18", "backend 'trition'; did you mean 'triton'?"),
    "misspelled native": ("version: 1\nprefer: [natve]\n", "2:10", "did you mean 'native'?"),
    "unknown backend of an id": (
        "version: 1\ndeny: [tirton.x]\n",
        "2:8",
        "'tirton' in 'tirton.x'; did you mean 'triton'?",
    ),
    "unknown implementation": (
        "version: 1\nprefer: [torch.matmull]\n",
        "2:10",
        "backend 'torch' has no implementation 'torch.matmull'; did you mean 'torch.matmul'?",
    ),
    "unknown decomposition": (
        "version: 1\ndeny: [composite.gemm_gelu]\n",
        "2:8",
        "did you mean 'composite.gemm_then_gelu'?",
    ),
    "unknown trait": ("version: 1\ndeny: ['trait:flsh']\n", "2:8", "unknown trait 'flsh'; did you mean 'flash'?"),
    "listed twice": ("version: 1\nprefer: [torch, triton, torch]\n", "2:25", "'torch' is listed twice"),
    "backend name": ("version: 1\noptional_backends: [Acme.x]\n", "2:21", "'Acme.x' is no backend's name"),
    "first-party optional": ("version: 1\noptional_backends: [cuda]\n", "2:21", "'cuda' is first-party"),
    "unknown operator": (
        "version: 1\nrules:\n  - op: gem\n    prefer: [torch]\n",
        "3:9",
        "op: 'gem' is no operator and no family; did you mean 'gemm'?",
    ),
    "glob that matches nothing": (
        "version: 1\nrules:\n- {op: atention_*, prefer: [torch]}\n",
        "3:8",
        "'atention_*' matches no operator and no family; did you mean 'attention",
    ),
    "version of an operator": (
        "version: 1\nrules:\n- {op: gemm@7, prefer: [torch]}\n",
        "3:8",
        "'gemm@7' names a version that does not exist; there is gemm@2",
    ),
    "version of a family": (
        "version: 1\nrules:\n- {op: attention@2, prefer: [torch]}\n",
        "3:8",
        "there is attention_fwd@1, attention_bwd@1",
    ),
    "version that is a word": (
        "version: 1\nrules:\n- {op: gemm@new, deny: [torch]}\n",
        "3:8",
        "'gemm@new' names a version",
    ),
    "implementation of another operator": (
        "version: 1\nrules:\n- {op: gemm, prefer: [torch.sdpa_fwd]}\n",
        "3:23",
        "'torch.sdpa_fwd' implements attention_fwd, which this rule does not speak of",
    ),
    "rule that says nothing": ("version: 1\nrules:\n- op: gemm\n", "3:3", "the rule says nothing"),
    # when
    "unknown fact": (
        "version: 1\nrules:\n- op: attention\n  when: {seqlenq: 5}\n  prefer: [torch]\n",
        "4:10",
        "unknown fact 'seqlenq'; did you mean 'seqlen_q'?",
    ),
    "fact of another operator": (
        "version: 1\nrules:\n- op: gemm\n  when: {seqlen_q: 5}\n  prefer: [torch]\n",
        "4:10",
        "unknown fact 'seqlen_q'",
    ),
    "unknown device fact": (
        "version: 1\nrules:\n- op: gemm\n  when: {device.vender: amd}\n  prefer: [torch]\n",
        "4:10",
        "did you mean 'device.vendor'?",
    ),
    "fact twice": (
        "version: 1\nrules:\n- op: gemm\n  when: {vendor: amd, device.vendor: amd}\n  prefer: [torch]\n",
        "4:23",
        "'device.vendor' is the fact 'device.vendor', given twice",
    ),
    "unknown vendor": (
        "version: 1\nrules:\n- op: gemm\n  when: {vendor: nvida}\n  prefer: [torch]\n",
        "4:18",
        "unknown vendor 'nvida'; did you mean 'nvidia'?",
    ),
    "vendor that looks like a slip, beside a backend whose vendor is not known here": (
        "version: 1\noptional_backends: [initech]\nrules:\n- op: gemm\n  when: {vendor: nvida}\n  prefer: [torch]\n",
        "5:18",
        "unknown vendor 'nvida'; did you mean 'nvidia'?",
    ),
    "unknown arch": (
        "version: 1\nrules:\n- op: gemm\n  when: {vendor: nvidia, arch: sm_99}\n  prefer: [torch]\n",
        "4:32",
        "unknown arch 'sm_99' of nvidia; did you mean 'sm_90'?",
    ),
    "arch of another vendor": (
        "version: 1\nrules:\n- op: gemm\n  when: {vendor: acme, arch: [x1, sm_90]}\n  prefer: [torch]\n",
        "4:30",
        "unknown arch 'sm_90' of acme; known: x1, x2",
    ),
    "arch without a number": (
        "version: 1\nrules:\n- op: gemm\n  when: {arch: '>= hopper'}\n  prefer: [torch]\n",
        "4:16",
        "'hopper' has no number",
    ),
    "unknown dtype": (
        "version: 1\nrules:\n- op: gemm\n  when: {a.dtype: [fp16, bfloat16]}\n  prefer: [torch]\n",
        "4:19",
        "unknown dtype 'bfloat16'; did you mean",
    ),
    "dtype that is compared": (
        "version: 1\nrules:\n- op: gemm\n  when: {a.dtype: '> fp16'}\n  prefer: [torch]\n",
        "4:19",
        "a.dtype: has no order",
    ),
    "size that is a word": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '16'}\n  prefer: [torch]\n",
        "4:13",
        "k: a size is a whole number or a comparison such as '>= 512', got '16'",
    ),
    "size compared with a word": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '>= big'}\n  prefer: [torch]\n",
        "4:13",
        "k: compares with a number, got 'big'",
    ),
    "comparison that cannot be read": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '=> 3'}\n  prefer: [torch]\n",
        "4:13",
        "cannot read '=> 3'; write '>= N'",
    ),
    "infinite bound": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '>= inf'}\n  prefer: [torch]\n",
        "4:13",
        "k: compares with a finite number, got inf",
    ),
    "infinite bound in words": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '< infinity'}\n  prefer: [torch]\n",
        "4:13",
        "k: compares with a finite number",
    ),
    "bound beyond all numbers": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '>= 1e999'}\n  prefer: [torch]\n",
        "4:13",
        "k: compares with a finite number",
    ),
    "bound that is not a number": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '> nan'}\n  prefer: [torch]\n",
        "4:13",
        "k: compares with a finite number",
    ),
    "infinite number": (
        "version: 1\nrules:\n- op: gemm\n  when: {name: 1e999}\n  prefer: [torch]\n",
        "4:16",
        "name: must be finite",
    ),
    "bound of a version without digits": (
        "version: 1\nrules:\n- op: gemm\n  when: {version.torch: '>= v99.1'}\n  prefer: [torch]\n",
        "4:25",
        "'v99.1' is no version: it must start with a digit",
    ),
    "bound of a version in words": (
        "version: 1\nrules:\n- op: gemm\n  when: {version.torch: '< abc'}\n  prefer: [torch]\n",
        "4:25",
        "'abc' is no version",
    ),
    "version in words": (
        "version: 1\nrules:\n- op: gemm\n  when: {version.torch: newest}\n  prefer: [torch]\n",
        "4:25",
        "'newest' is no version",
    ),
    "multiples of a version": (
        "version: 1\nrules:\n- op: gemm\n  when: {version.torch: '% 2 == 0'}\n  prefer: [torch]\n",
        "4:25",
        "a version has no multiples",
    ),
    "list of versions": (
        "version: 1\nrules:\n- op: gemm\n  when: {version.torch: ['2.12', '2.13']}\n  prefer: [torch]\n",
        "4:25",
        "takes one version or comparison, not a list",
    ),
    "device boolean is a word": (
        "version: 1\nrules:\n- op: gemm\n  when: {fp8_matmul: yes}\n  prefer: [torch]\n",
        "4:22",
        "device.fp8_matmul: must be true or false, got 'yes'",
    ),
    "device size is a word": (
        "version: 1\nrules:\n- op: gemm\n  when: {warp_size: foo}\n  prefer: [torch]\n",
        "4:21",
        "device.warp_size: must be a whole number or a comparison such as '>= 32', got 'foo'",
    ),
    "device type in capitals": (
        "version: 1\nrules:\n- op: gemm\n  when: {type: CPU}\n  prefer: [torch]\n",
        "4:16",
        "unknown device type 'CPU'; did you mean 'cpu'?",
    ),
    "device type misspelt": (
        "version: 1\nrules:\n- op: gemm\n  when: {type: [cpu, cdua]}\n  prefer: [torch]\n",
        "4:16",
        "unknown device type 'cdua'; did you mean 'cuda'?",
    ),
    "multiple of zero": (
        "version: 1\nrules:\n- op: gemm\n  when: {k: '% 0 == 0'}\n  prefer: [torch]\n",
        "4:13",
        "divides by zero",
    ),
    "empty list of values": (
        "version: 1\nrules:\n- op: gemm\n  when: {layout: []}\n  prefer: [torch]\n",
        "4:18",
        "the list of accepted values is empty",
    ),
    # contradictions
    "prefer and deny": (
        "version: 1\nprefer: [torch]\ndeny: [torch]\n",
        "2:10",
        "prefer names 'torch', but deny removes it",
    ),
    "allow and deny": (
        "version: 1\ndeny: [torch]\nallow: [torch]\n",
        "3:9",
        "allow names 'torch', but deny removes it",
    ),
    "an id of a denied backend": ("version: 1\ndeny: [torch]\nprefer: [torch.matmul]\n", "3:10", "but deny removes it"),
    "trait": ("version: 1\ndeny: ['trait:flash']\nprefer: ['trait:flash']\n", "3:10", "but deny removes it"),
    "require and deny": ("version: 1\nrequire: [triton]\ndeny: [triton]\n", "2:11", "require names 'triton', but deny"),
    "require and allow": ("version: 1\nrequire: [triton]\nallow: [torch]\n", "2:11", "but only torch is allowed"),
    "rule and top-level deny": (
        "version: 1\ndeny: [torch]\nrules:\n- {op: gemm, prefer: [torch]}\n",
        "4:23",
        "prefer names 'torch', but deny removes it ('torch' at ",
    ),
    "rule and top-level allow": (
        "version: 1\nallow: []\nrules:\n- {op: gemm, require: [torch]}\n",
        "4:24",
        "but only nothing is allowed",
    ),
    "rule behind one without when": (
        "version: 1\nrules:\n- {op: gemm, prefer: [torch]}\n- {op: gemm, when: {k: 3}, prefer: [triton]}\n",
        "4:3",
        "is never reached: the rule for 'gemm' at ",
    ),
    "operator behind its family": (
        "version: 1\nrules:\n- {op: attention, prefer: [torch]}\n- {op: attention_fwd, prefer: [triton]}\n",
        "4:3",
        "comes first and has no 'when'",
    ),
    "rule behind a wider one": (
        "version: 1\nrules:\n- {op: '*', when: {vendor: amd}, allow: [torch]}\n"
        "- {op: gemm, when: {k: 3, vendor: amd}, allow: [triton]}\n",
        "4:3",
        "matches whenever this one does",
    ),
    "missing include": ("version: 1\ninclude: [gone.yaml]\n", "2:11", "gone.yaml: no such policy file"),
    "misspelled include": (
        "version: 1\ninclude: [defalt]\n",
        "2:11",
        "neither a shipped policy nor a file; did you mean 'default'?",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_refused_at_its_place(name: str, known: Known, tmp_path: Path) -> None:
    text, place, message = MISTAKES[name]
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        load_policy(path, known)
    assert str(caught.value).startswith(f"{path}:{place}: "), caught.value
    assert message in str(caught.value)


def test_missing_file(known: Known, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"gone\.yaml: no such policy file"):
        load_policy(tmp_path / "gone.yaml", known)


def test_misspelled_shipped_name(known: Known) -> None:
    with pytest.raises(PolicyError, match="'portabel' is neither a shipped policy nor a file; did you mean 'portable'"):
        load_policy("portabel", known)


def test_directory(known: Known, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such policy file"):
        load_policy(tmp_path / "..", known)


def test_not_utf8(known: Known, tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("version: 1\ndescription: für\n".encode("latin-1"))
    with pytest.raises(PolicyError) as caught:
        load_policy(path, known)
    assert str(caught.value) == f"{path}:2:15: byte 0xfc is not UTF-8; save the file as UTF-8"
