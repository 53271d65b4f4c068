"""Everything that users are known to do wrong, or that goes wrong for them.

The tests run each row. A command runs in a folder of its own, with its files and with a tuned
database, in the state that one of the `places` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from taxfree_cli.exits import ExitCode
from tests.bad_input import places
from tests.bad_input.places import Place, config_json

FAILED, USAGE, NO_HARDWARE = ExitCode.FAILED, ExitCode.USAGE, ExitCode.NO_HARDWARE
WRONG_RESULT, PEER_LOST = ExitCode.WRONG_RESULT, ExitCode.PEER_LOST


@dataclass(frozen=True)
class Row:
    """A command that is refused.

    Args:
        did: what the user did, or what happened, in words; names the row.
        command: as typed after `taxfree`.
        code: the exit code.
        error: a part of the line that says what is wrong.
        hint: a part of the line that says what to do.
        files: name -> content, in the current folder.
        environment: variables.
        place: the state of the machine, the database and the terminal.
    """

    did: str
    command: str
    code: ExitCode
    error: str
    hint: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    place: Callable[[Place], None] = lambda _: None


@dataclass(frozen=True)
class Call:
    """A call in a user's own program that is refused on some rank.

    Args:
        did: what the user did, in words.
        task: the function of `tests.bad_input.calls` that does it.
        code: the exit code that the error stands for.
        error, hint: as in a row.
        ranks: those that are told; all by default.
    """

    did: str
    task: str
    code: ExitCode
    error: str
    hint: str
    ranks: tuple[int, ...] = (0, 1)


SEE = "the docstring"
EXAMPLE = 'for example --shapes "m=1,16 n=3584 k=8192"'
OF_STENCIL = 'for example --shapes "rows=1024 columns=1024", --shapes plane'
RANK = "--fabric host --gpus 1"
HOST = "--fabric host --gpus 2"
SHAPE = '--shapes "m=16 n=64 k=64"'
WHOLE = f"{HOST} --model llama-3.1-8b"


def _shapes(did: str, shape: str, error: str, hint: str = EXAMPLE, more: str = "") -> Row:
    return Row(did, f"shapes --shapes {shape!r} {more}".rstrip(), USAGE, error, hint)


def _file(did: str, content: str | bytes, error: str, hint: str = "a list of shapes") -> Row:
    command = "shapes --shapes shapes.yaml"
    return Row(did, command, USAGE, error, hint, {"shapes.yaml": content})


def _model(did: str, content: str | bytes, error: str, hint: str = "Hugging Face") -> Row:
    command = "shapes --model config.json --tp 8"
    return Row(did, command, USAGE, error, hint, {"config.json": content})


def _stored(
    did: str,
    place: Callable[[Place], None],
    error: str,
    hint: str,
    command: str = "db list",
) -> Row:
    return Row(did, command, FAILED, error, hint, place=place)


def _import(did: str, content: str | bytes, error: str, hint: str = "taxfree db export") -> Row:
    return Row(did, "db import records.json", FAILED, error, hint, {"records.json": content})


def _earlier(did: str, content: str | bytes, error: str) -> Row:
    command = f"bench {HOST} {SHAPE} --compare old.json"
    return Row(did, command, USAGE, error, "bench --out", {"old.json": content})


def _variable(name: str, value: str, command: str, error: str, hint: str) -> Row:
    return Row(f"{name}={value}", command, USAGE, error, hint, environment={name: value})


SHAPES = [
    _shapes("an empty shape", "", "a shape is empty"),
    _shapes("a blank shape", "  ", "a shape is empty"),
    _shapes("an empty shape of a stencil", "", "a shape is empty", OF_STENCIL, "--op stencil"),
    _shapes("no steps of a stencil", "rows=8 columns=8 steps=0", "steps is 0, must be at least 1",
            OF_STENCIL, "--op stencil --gpus 1"),
    _shapes("a field without a value", "m= n=64 k=64", "m='' is not an integer"),
    _shapes("a hole in a list", "m=1,,4 n=64 k=64", "m='' is not an integer"),
    _shapes("a size that is a word", "m=some n=64 k=64", "m='some' is not an integer"),
    _shapes("a negative size", "m=-1 n=64 k=64", "m='-1' is not an integer"),
    _shapes("a size with a decimal point", "m=1.5 n=64 k=64", "m='1.5' is not an integer"),
    _shapes("a size of zero", "m=0 n=64 k=64", "m is 0, must be at least 1"),
    _shapes("a size of 10^20", f"m=1{'0' * 20} n=64 k=64", "an integer from 0 to 2147483647"),
    _shapes("a size is missing", "m=16 n=64", "lacks k"),
    _shapes("a size twice", "m=1 m=2 n=64 k=64", "m is given twice", "m=1,2"),
    _shapes("an unknown field", "m=16 n=64 k=64 q=1", "no field 'q'", "fields: m, n, k"),
    _shapes("an unknown dtype in a shape", "m=16 n=64 k=64 dtype=int4", "dtype int4 is not one of"),
    _shapes("an unknown layout", "m=16 n=64 k=64 weight_layout=mn", "must be 'nk' or 'kn'"),
    _shapes("gather_dim 2", "m=16 n=64 k=64 gather_dim=2", "gather_dim is 2"),
    _shapes("a shorthand of two sizes", "16x64", "no set or shape '16x64'", "shorthand: MxNxK"),
    _shapes("a misspelt set", "papr", "no set or shape 'papr'", "did you mean 'paper'?"),
    _shapes("a set in capitals", "PAPER", "no set or shape 'PAPER'", "did you mean 'paper'?"),
    _shapes("a set of another operation", "decode", "decode is a set of another operation",
            "add --op matmul_all_reduce"),
    _shapes("sets with a comma", "demo,paper", "sets are not a list",
            "--shapes demo --shapes paper"),
    _shapes("an unknown set", "everything", "no set or shape", "sets: paper, large, demo"),
    _shapes("the set of a model, and no model", "model m=1", "there is no model", "--model"),
    _shapes(
        "K is not divisible by the ranks", "m=16 n=64 k=100", "k=100 is not divisible by 8 ranks",
        "each rank holds k / world_size columns", "--gpus 8",
    ),
    _shapes("a set that does not split", "paper", "k=8192 is not divisible by 3",
            "each rank holds k / world_size columns", "--gpus 3"),
    _shapes(
        "more problems than anybody measures", "m=1,2,3,4,5,6,7,8,9,10 "
        + " ".join(f"{name}={','.join(map(str, range(1, 41)))}" for name in "nk"),
        "are 16000 problems, more than 10000", "give several --shapes", "--gpus 1 --dtype bf16",
    ),
    Row("bytes that are no text", "shapes --shapes \udcff", USAGE, "no set or shape", "sets:"),
    Row("a shape file is not there", "shapes --shapes none.yaml", USAGE,
        "shape file 'none.yaml' cannot be read: No such file", "check the path"),
    _file("a shape file is empty", "", "is not a list of shapes"),
    _file("a shape file is not YAML", "- [m=16", "is not YAML"),
    _file("a shape file is no list", "m: 16", "is not a list of shapes"),
    _file("a shape file holds a number", "- 16", "no set or shape '16'", "shorthand"),
    _file("a shape file holds an empty entry", "- {}", "an entry is not a shape"),
    _file("a shape file holds nested lists", "- [[16]]", "an entry is not a shape"),
    _file("a shape file holds a nested mapping", "- {m: {n: 1}}", "an entry is nested too deeply"),
    _file("a shape file nests sizes of a stencil", "- {op: stencil, rows: {columns: 8}}",
        "an entry is nested too deeply", "- {rows: 1024, columns: 1024}"),
    Row("a shape file of a stencil is not YAML", "shapes --shapes shapes.yaml --op stencil", USAGE,
        "is not YAML", '- "rows=1024 columns=1024", or - {rows: 1024, columns: 1024}',
        {"shapes.yaml": "- [rows=16"}),
    _file("a shape file names keys that are lists", "- {[m]: 1}", "is not YAML"),
    _file("a shape file of 10^9 words by aliases", places.alias_bomb(), "an entry is not a shape"),
    _file("a shape file names an unknown operation", "- {op: convolution, m: 1, n: 1, k: 1}",
        "there is no operation 'convolution'", "one of: all_gather_matmul"),
    _file("a shape file has an operation that is a list", "- {op: [flash_decode], m: 1}",
        "there is no operation a list", "one of: all_gather_matmul"),
    _file("a shape file has calls that are no number", "- {m: 1, n: 1, k: 1, calls: often}",
        "calls: 'often' is not a number", "leave calls out"),
    _file("a shape file has calls alone", "- {op: flash_decode, calls: 3}",
        "an entry is not a shape"),
    _file("a field of another operation", "- {op: matmul_all_reduce, m: 1, n: 1, k: 1, batch: 1}",
        "no field 'batch'", "fields: m, n, k"),
    Row("a shape file of other operations", "shapes --shapes shapes.yaml --op flash_decode", USAGE,
        "none of the shapes is of flash_decode", "they are of matmul_all_reduce",
        {"shapes.yaml": "- {op: matmul_all_reduce, m: 1, n: 1, k: 1}"}),
    Row("a picture of two operations", f"bench {HOST} --shapes shapes.yaml --plot all.png", USAGE,
        "--plot draws one operation", "--op",
        {"shapes.yaml": "- {m: 1, n: 1, k: 2}\n- {op: matmul_all_reduce, m: 1, n: 1, k: 1}"}),
    _file("a shape file is a pickle", places.a_pickle(), "is not text", "check the path"),
    _file("a shape file is deeply nested", "[" * 1000, "is not YAML"),
]  # fmt: skip

MODELS = [
    Row("a model's config is not there", "shapes --model none.json", USAGE,
        "model config 'none.json' cannot be read", "check the path"),
    Row("a model's config has no end", "shapes --model /dev/zero", USAGE,
        "model config '/dev/zero' cannot be read: File too large", "check the path"),
    Row("a model that is not known", "shapes --model llama-3.1-71b", USAGE,
        "model 'llama-3.1-71b' is neither a file nor a known model", "did you mean"),
    Row("an operation that serves no layer", "shapes --model deepseek-v3 --op flash_decode", USAGE,
        "flash_decode serves no layer of the model", "taxfree shapes --model"),
    Row("an operation that serves no layer in its type", "shapes --model config.json", USAGE,
        "matmul_all_reduce serves no layer of the model", "--dtype bf16 lists",
        {"config.json": config_json(quantization_config={"quant_method": "awq"})}),
    Row("a model's folder has no config", "shapes --model . --tp 8", USAGE,
        "model config 'config.json' cannot be read", "check the path"),
    _model("a model's config is not JSON", "{", "is not JSON"),
    _model("a model's config is a list", "[]", "is not an object"),
    _model("a model's config is deeply nested", "[" * 100_000, "is not JSON"),
    _model("a model's config has a number of 5000 digits", "9" * 5000, "is not JSON"),
    _model("a model's config is a pickle", places.a_pickle(), "is not text", "check the path"),
    _model("a model's config is of another kind", '{"d_model": 512}', "model_type is missing"),
    _model("a model that Transformers does not know", '{"model_type": "alpaca"}',
           "Transformers knows no model_type 'alpaca'"),
    _model("a model that is no decoder", '{"model_type": "bert"}', "bert is no decoder"),
    _model("a model's size is text", config_json(hidden_size="4096"),
           "Field 'hidden_size' expected int"),
    _model("a model's size is negative", config_json(hidden_size=-1),
           "Transformers does not build it"),
    _model("a model's size is huge", config_json(hidden_size=2**40),
           "Transformers does not build it"),
    _model("a model's layers are many", config_json(num_hidden_layers=10**9),
           "num_hidden_layers is 1000000000"),
    _model("a model of fp8", config_json(quantization_config={"quant_method": "fp8"}),
           "layers that are quantised (fp8)", "--dtype bf16 lists"),
    Row("a path that is none", "shapes --model phi-4 --path tq", USAGE,
        "'tq' is no path of a model", "tp, sequence, attention"),
    Row("--training without a model", "shapes --training", USAGE,
        "--path and --training are of a model", "add --model"),
    _model("heads do not split over the ranks",
           config_json(num_attention_heads=60, num_key_value_heads=10, hidden_size=7680),
           "num_attention_heads 60 of the model does not split over 8 ranks", "another --tp"),
    Row("--tp without a model", "shapes --tp 8", USAGE, "--tp says how a model is split",
        "add --model"),
    Row("a model over no ranks", "shapes --model llama-3.1-8b --tp 0", USAGE,
        "greater than or equal to 1", "--help"),
    Row("--tp and --gpus differ", "shapes --model config.json --tp 8 --gpus 4", USAGE,
        "--tp 8 and --gpus 4 differ", "--gpus alone", {"config.json": config_json()}),
]  # fmt: skip

OPTIONS = [
    Row("an unknown command", "tuen", USAGE, "No such command 'tuen'", "taxfree --help"),
    Row("an unknown command of db", "db shw", USAGE, "No such command 'shw'", "taxfree db --help"),
    Row("an unknown option", "tune --speed 3", USAGE, "No such option", "taxfree tune --help"),
    Row("an option without its value", "shapes --gpus", USAGE, "requires an argument", "--help"),
    Row("a surplus argument", "shapes paper", USAGE, "unexpected extra argument", "--help"),
    Row("a missing argument", "db import", USAGE, "Missing argument", "taxfree db import --help"),
    *(Row(f"an unknown operation to {what}", f"{command} --op convolution", USAGE,
          "there is no operation 'convolution'", "one of: all_gather_matmul")
      for what, command in {
          "list": "shapes", "tune": f"tune {HOST}", "bench": f"bench {HOST}",
          "explain": f"explain {HOST}", "check": "check", "compile": "check --compiled",
          "look up": f"db why {SHAPE}"}.items()),
    *(Row(f"a step of no model to {command}", f"{command} {HOST} --op decode_step", USAGE,
          "a decode step is of a model", "--model qwen3-8b") for command in ("tune", "explain")),
    *(Row(f"a batch of no step to {command}", f"{command} {HOST} --batch 2", USAGE,
          "--batch is for a step of a whole model", "--op decode_step")
      for command in ("tune", "explain")),
    *(Row(f"a step with {option}", f"{command} {option} {WHOLE} --op decode_step", USAGE,
          f"{option} is not for --op decode_step", "--batch")
      for command, option in (("tune", "--check"), ("explain", "--sweep"))),
    *(Row(f"an unknown variant to {what}", f"{command} --variant teleport", USAGE,
          "has no variant 'teleport'", "one of: ")
      for what, command in {
          "tune": f"tune {HOST} {SHAPE}", "bench": f"bench {HOST} {SHAPE}",
          "explain": f"explain {HOST} {SHAPE}", "check": "check",
          "compile": "check --compiled"}.items()),
    Row("layers of no model", f"bench {HOST} {SHAPE} --layers 4", USAGE,
        "--layers is for a whole model", "neither --op nor --shapes"),
    Row("an option of problems for a whole model", f"bench {WHOLE} --min-speedup 1", USAGE,
        "--min-speedup is not for a whole model", "--shapes model"),
    Row("lengths that are none", f"bench {WHOLE} --prefill 1024,0", USAGE,
        "--prefill '1024,0' is not a list of sizes", "256,1024,4096"),
    Row("an unknown mode of a whole model", f"bench {WHOLE} --mode fast", USAGE,
        "there is no mode 'fast'", "one of: eager, compiled"),
    Row("a whole model with experts", f"bench {HOST} --model mixtral-8x7b", USAGE,
        "mixtral-8x7b is no dense model of llama", "--shapes model"),
    Row("a whole model on several numbers of ranks",
        "bench --fabric host --gpus 2,4 --model llama-3.1-8b", USAGE,
        "--gpus 2,4: a model is split over one number", "--gpus 2"),
    Row("a whole model of fp8", f"bench {HOST} --model config.json", USAGE,
        "config.json computes in fp8, which the operations do not", "--dtype bf16",
        {"config.json": config_json(quantization_config={"quant_method": "fp8"})}),
    Row("a whole model of fp8 that operations serve", f"bench {HOST} --model config.json", USAGE,
        "config.json has layers in fp8", "tune --op decode_step",
        {"config.json": config_json(quantization_config={
            "quant_method": "fp8", "weight_block_size": [128, 128]})}),
    Row("a whole model of float32", f"bench {HOST} --model config.json", USAGE,
        "config.json computes in float32", "--dtype bf16",
        {"config.json": config_json(dtype="float32")}),
    Row("more layers than there are", f"bench {WHOLE} --layers 33", USAGE,
        "llama-3.1-8b has 32 layers, not 33", "fewer --layers"),
    Row("an option of one value twice", "tune --op flash_decode --op=attention", USAGE,
        "--op is given twice", "give it once"),
    Row("two world sizes", 'shapes --gpus 2 --shapes "m=16 n=64 k=64 world_size=4"', USAGE,
        "a shape is of world_size=4, and --gpus is another", "give only one"),
    Row("the default dtype, where records are of another",
        "db show --gpus 8 --shapes paper", FAILED, "no record of m=1", "add --dtype bfloat16"),
    Row("an unknown dtype", "shapes --dtype int4", USAGE, "'int4' is not one of", "--help"),
    Row("an unknown fabric", "tune --fabric ether", USAGE, "'ether' is not one of", "--help"),
    Row("an unknown hardware", f"tune --dry-run --hardware abacus {SHAPE}", USAGE,
        "unknown hardware 'abacus'", "one of: h100, h200"),
    Row("hardware that is not here, to measure on", f"tune {HOST} {SHAPE} --hardware h200", USAGE,
        "--hardware is for --dry-run and --check", "what is not here cannot be measured"),
    Row("a database to model with", f"explain --hardware h200 {SHAPE} --db tuning.sqlite", USAGE,
        "--hardware takes neither --fabric nor --db", "a model measures and dispatches nothing"),
    Row("a fabric to model", f"explain --hardware h200 {SHAPE} --fabric auto", USAGE,
        "--hardware takes neither --fabric nor --db", "a model measures and dispatches nothing"),
    *(Row(f"{what} of ranks to scale to", f"explain --scale {scale}", USAGE,
          f"--scale '{scale}' is no range of ranks", "such as 2..64")
      for what, scale in (("a word", "many"), ("one number", "64"), ("an empty range", "64..2"))),
    Row("a link without a time", "explain --scale 2..64 --link 50", USAGE,
        "--link '50' is no link", "as 50,5"),
    Row("a link without nodes", "explain --hardware h200 --link 50,5", USAGE,
        "--link is the link between nodes of --scale", "add --scale 2..64"),
    Row("hardware to scale on", "explain --scale 2..64 --hardware h200", USAGE,
        "--hardware is not for --scale", "it models what records say"),
    Row("a shape without records to scale", f"explain --scale 2..64 {SHAPE}", FAILED,
        "no record of NVIDIA H200 is of these problems", "taxfree db list"),
    Row("a check of nothing", "tune --check --hardware h200", USAGE, "no problems are given",
        "add --model or --shapes"),
    Row("a check that would measure", f"tune --check {SHAPE} --budget 10m", USAGE,
        "--check takes neither --dry-run, --budget nor --variant", "it measures nothing"),
    Row("a check of two machines", f"tune --check {HOST} {SHAPE} --hardware h200", USAGE,
        "--hardware and --fabric are given", "give one of them"),
    Row("a check of an unknown GPU", f"tune --check {SHAPE} --hardware abacus", USAGE,
        "unknown hardware 'abacus'", "one of: h100, h200"),
    Row("a check of a problem without a record", f"tune --check {SHAPE} --hardware h200 --json",
        FAILED, "1 of 1 problems lack a current record of NVIDIA H200", "taxfree tune"),
    Row("problems of a run that are not there", "tune --from met.yaml", USAGE,
        "--from met.yaml is no YAML file", "TAXFREE_LOG=problems.yaml"),
    Row("GPUs in words", "tune --gpus many", USAGE, "'many' is not a number of GPUs", "--gpus 8"),
    Row("no GPUs", "tune --gpus 0", USAGE, "'0' is not a number of GPUs", "--gpus 8"),
    Row("a hole in a list of GPUs", "bench --gpus 2,,4", USAGE, "is not a number of GPUs", "2,4,8"),
    Row("no trials", f"tune {HOST} {SHAPE} --trials 0", USAGE, "greater than or equal to 1",
        "--help"),
    Row("the baseline to tune", f"tune {HOST} {SHAPE} --variant baseline", USAGE,
        "--variant baseline cannot be tuned", "always measured"),
    Row("a budget without a unit", f"tune {HOST} {SHAPE} --budget 10", USAGE,
        "invalid --budget '10'", "90s, 10m or 1h"),
    Row("a budget of nothing", f"tune {HOST} {SHAPE} --budget 0s", USAGE, "invalid --budget '0s'",
        "90s"),
    Row("a negative seed", f"tune {HOST} {SHAPE} --seed -1", USAGE, "greater than or equal to 0",
        "--help"),
    Row("a file to check that is not there", "check nope.py::x", USAGE,
        "there is no file 'nope.py'", "check the path"),
    Row("a file to check that is no Python", "check notes.txt::x", USAGE,
        "'notes.txt' is no Python file", ".py", files={"notes.txt": ""}),
    Row("a file to check that cannot be imported", "check mine.py::x", USAGE,
        "mine.py cannot be imported: ModuleNotFoundError", "TAXFREE_DEBUG=1",
        files={"mine.py": "import no_such_module"}),
    Row("no schedules to check", "check --seeds 0", USAGE, "greater than or equal to 1", "--help"),
    Row("an unknown architecture to execute", "check --executed --arch gfx90a", USAGE,
        "unknown architecture 'gfx90a'", "gfx942 or gfx950"),
    Row("another Triton without --compiled", "check --triton .", USAGE,
        "--triton needs --compiled", "interpreted, not compiled"),
    Row("a shape to compile", f"check --compiled {SHAPE}", USAGE,
        "--compiled takes neither --shapes", "default configs"),
    Row("schedules to compile", "check --compiled --seeds 100", USAGE,
        "--compiled takes neither --shapes, --gpus, --dtype, --seeds", "default configs"),
    Row("a first schedule to compile", "check --compiled --first-seed 0", USAGE,
        "--dtype, --seeds nor --first-seed", "default configs"),
    Row("another Triton that is not there", "check --compiled --triton nowhere", USAGE,
        "there is no Triton in 'nowhere'", "pip install --no-deps --target nowhere"),
    Row("a speed-up that is no number", f"bench {HOST} {SHAPE} --min-speedup nan", USAGE,
        "--min-speedup nan is not a positive number", "--min-speedup 1.1"),
    Row("no problem to look up", "db why", USAGE, "no problem is given", "--shapes"),
    Row("a problem that was never tuned", f"db show {SHAPE}", FAILED, "no record of m=16 n=64 k=64",
        "taxfree tune"),
    _variable("TAXFREE_TIMEOUT", "soon", f"tune {HOST} {SHAPE}",
              "TAXFREE_TIMEOUT=soon is not a positive number of seconds", "TAXFREE_TIMEOUT=30"),
    _variable("TAXFREE_TIMEOUT", "1e308", f"tune {HOST} {SHAPE}",
              "TAXFREE_TIMEOUT=1e308 is not a positive number of seconds", "TAXFREE_TIMEOUT=30"),
    _variable("TAXFREE_DISABLE", "maybe", f"bench {HOST} {SHAPE}",
              "TAXFREE_DISABLE=maybe is neither on nor off", "TAXFREE_DISABLE=1"),
    _variable("TAXFREE_STRICT", "maybe", f"explain {HOST} {SHAPE}",
              "TAXFREE_STRICT=maybe is neither on nor off", "TAXFREE_STRICT=1"),
    Row("TAXFREE_DB in the home of nobody", "db export", FAILED,
        "there is no tuning database at ~nobody-here/tuning.sqlite", "taxfree tune",
        environment={"TAXFREE_DB": "~nobody-here/tuning.sqlite"}),
]  # fmt: skip

FILES = [
    Row("results into a path through a file", f"bench {HOST} {SHAPE} --out file/new.json", FAILED,
        "file/new.json cannot be written: Not a directory", "check the path", {"file": ""}),
    Row("results into the root of all folders", f"bench {HOST} {SHAPE} --out /", FAILED,
        "/ cannot be written: Is a directory", "check the path"),
    Row("a report of nothing that is shown", "report --results other.json", USAGE,
        "other.json holds nothing that a report shows", "bench --out", {"other.json": "{}"}),
    Row("a report of what is no JSON", "report --results other.json", USAGE,
        "other.json cannot be read as JSON", "a result file", {"other.json": "<html>"}),
    Row("results into a database", f"bench {HOST} {SHAPE} --out saved.sqlite", FAILED,
        "saved.sqlite cannot be written: it is a database", "another file",
        {"saved.sqlite": "SQLite format 3\0"}),
    Row("results and picture into one file", f"bench {HOST} {SHAPE} --out a.png --plot ./a.png",
        USAGE, "--out and --plot name one file", "its own"),
    Row("results into a folder", f"bench {HOST} {SHAPE} --out .", FAILED,
        ". cannot be written: Is a directory", "check the path"),
    Row("a picture of an unknown kind", f"bench {HOST} {SHAPE} --plot picture.txt", USAGE,
        "--plot picture.txt: no such kind of picture", "png"),
    Row("a timeline of an unknown kind", f"explain {HOST} {SHAPE} --timeline picture.txt", USAGE,
        "--timeline picture.txt: no such kind of picture", "png"),
    Row("a trace into a folder", f"explain {HOST} {SHAPE} --trace .", FAILED,
        ". cannot be written: Is a directory", "check the path"),
    Row("earlier results are not there", f"bench {HOST} {SHAPE} --compare none.json", USAGE,
        "none.json cannot be read", "bench --out"),
    _earlier("earlier results are not JSON", "{", "cannot be read as JSON"),
    _earlier("earlier results are deeply nested", "[" * 100_000, "cannot be read as JSON"),
    _earlier("earlier results are of no schema", "{}", "is not a result file of schema"),
    _earlier("earlier results have no rows", '{"schema": 1, "environment": {}}', "rows"),
    _earlier("earlier results have rows of text",
             '{"schema": 1, "environment": {}, "rows": ["fast"]}', "rows[0]"),
    _earlier("earlier results have an incomplete row",
             '{"schema": 1, "environment": {}, "rows": [{"op": "x"}]}', "rows[0]"),
    Row("results to adopt are not there", "db adopt none.json", USAGE, "none.json cannot be read",
        "bench --out"),
    Row("results to adopt have no end", "db adopt /dev/zero", USAGE,
        "/dev/zero cannot be read: File too large", "bench --out"),
    Row("an import that has no end", "db import /dev/zero", FAILED,
        "/dev/zero cannot be read: File too large", "check the path"),
    Row("an explanation that has no end", "explain --from /dev/zero", USAGE,
        "/dev/zero cannot be read: File too large", "check the path"),
    Row("a report of a file that has no end", "report --results /dev/zero", USAGE,
        "/dev/zero cannot be read: File too large", "check the path"),
    Row("a report of a file that is not there", "report --results none.json", USAGE,
        "none.json cannot be read: No such file or directory", "check the path"),
    Row("results to adopt are an export", "db adopt records.json", USAGE,
        "is not a result file of schema", "bench --out", {"records.json": places.exported()}),
    Row("results to adopt say nothing of the machine", "db adopt old.json", USAGE,
        "the environment is incomplete: 'hardware'", "bench --out",
        {"old.json": '{"schema": 1, "environment": {}, "rows": []}'}),
    Row("an export into a path through a file", "db export file/records.json", FAILED,
        "file/records.json cannot be written: Not a directory", "choose another path",
        {"file": ""}),
    Row("an export into a folder", "db export .", FAILED, ". cannot be written: ",
        "choose another path"),
    Row("an import is not there", "db import none.json", FAILED, "none.json cannot be read",
        "check the path"),
    Row("an import is a folder", "db import .", FAILED, "cannot be read: Is a directory",
        "check the path"),
    _import("an import is empty", "", "records.json is not a taxfree export: it is not JSON"),
    _import("an import is not JSON", "{", "is not a taxfree export: it is not JSON"),
    _import("an import is a pickle", places.a_pickle(), "is not a taxfree export: it is not text"),
    Row("a dry run of what is not an export", "db import records.json --dry-run", FAILED,
        "is not a taxfree export", "taxfree db export", {"records.json": "{}"}),
    Row("a table to compare is not there", "db diff tuning.sqlite none.json", FAILED,
        "none.json cannot be read", "check the path"),
    Row("a table to compare is none", "db diff records.json tuning.sqlite", FAILED,
        "records.json is not a taxfree export: it has no", "taxfree db export",
        {"records.json": "{}"}),
    Row("a table to compare has a record that is none", "db diff records.json tuning.sqlite",
        FAILED, "records[0]: problem: missing", "taxfree db export",
        {"records.json": '{"taxfree_tuning_db": 1, "records": [{"op": "x"}]}'}),
    Row("two tables to verify", "db verify tuning.sqlite --db tuning.sqlite", USAGE,
        "a table and --db are given", "give one of them"),
    Row("records of other machines to verify", "db verify tuning.sqlite --fabric host", FAILED,
        "none of 1 records of operations is of this machine", "taxfree db list"),
    _import("an import is deeply nested", "[" * 100_000, "it is not JSON"),
    _import("an import is another document", '{"records": []}', "it has no 'taxfree_tuning_db'"),
    _import("an import is of a newer version", '{"taxfree_tuning_db": 2}', "version 2 is not 1"),
    _import("an import without records", '{"taxfree_tuning_db": 1}', "it has no list of records"),
    Row("an import with a record that is none", "db import records.json --json", FAILED,
        "1 of 1 records are refused", "the warnings say why",
        {"records.json": '{"taxfree_tuning_db": 1, "records": [{}]}'}),
    Row("an import that is not an export, and no database yet", "db import records.json", FAILED,
        "is not a taxfree export", "taxfree db export", {"records.json": "{}"},
        place=places.no_database),
    Row("an import into a read-only database", "db import records.json", FAILED, "is read-only",
        "make it writable", {"records.json": places.exported()}, place=places.read_only),
    Row("an import into a locked database", "db import records.json", FAILED,
        "is locked by another process", "wait", {"records.json": places.exported()},
        place=places.locked),
]  # fmt: skip

DATABASE = [
    _stored("the database is not there", places.no_database,
            "there is no tuning database at tuning.sqlite", "run `taxfree tune` first",
            "db list --db tuning.sqlite"),
    _stored("the database to measure with is not there", places.no_database,
            "there is no tuning database at none.sqlite", "run `taxfree tune` first",
            f"bench {HOST} {SHAPE} --db none.sqlite"),
    _stored("the database is a folder", places.a_folder, "cannot be used", "check the path"),
    _stored("the database's path goes through a file", places.a_path_through_a_file,
            "cannot be reached: ", "check the path", f"tune {HOST} {SHAPE}"),
    _stored("the database may not be read", places.unreadable, "cannot be used", "permissions"),
    _stored("the database is read-only", places.read_only, "is read-only", "make it writable",
            f"tune {HOST} {SHAPE}"),
    _stored("the database's folder is read-only", places.in_a_read_only_folder,
            "the folder of tuning.sqlite is read-only", "make it writable", f"tune {HOST} {SHAPE}"),
    _stored("the database is text", places.not_sqlite, "is not a SQLite database", "point --db"),
    _stored("the database to tune into is text", places.not_sqlite, "is not a SQLite database",
            "point --db", f"tune {HOST} {SHAPE}"),
    _stored("the database is cut off", places.cut_off, "is damaged", "move it away"),
    _stored("the database is damaged", places.damaged, "is damaged", "move it away"),
    _stored("a damaged database, to tune into", places.damaged, "is damaged", "move it away",
            f"tune {HOST}"),
    _stored("the database is another program's", places.of_another_program,
            "is not a tuning database", "point --db"),
    _stored("the database is locked by another process", places.locked,
            "is locked by another process", "wait for the other taxfree command"),
    _stored("a locked database, to tune into", places.locked, "is locked by another process",
            "wait for the other taxfree command", f"tune {HOST} {SHAPE}"),
    _stored("the database is of a newer schema", places.newer, "has schema 2, newer than 1",
            "update taxfree"),
    _stored("a database of a newer schema, to tune into", places.newer, "has schema 2",
            "update taxfree", f"tune {HOST} {SHAPE}"),
    _stored("the database has a pickle as schema", places.of_no_schema, "is not a tuning database",
            "point --db"),
    _stored("the database has a pickle as trial", places.with_a_pickled_trial, "foreign record",
            "move it away", "db show --trials"),
    _stored("the disk is full", places.full, "cannot grow: the disk is full", "free some space",
            f"tune {HOST} {SHAPE} --variant one_shot --trials 1"),
    _stored("the disk is full for an export", places.no_room_for_files,
            "records.json cannot be written: File too large", "choose another path",
            "db export records.json"),
    _stored("nowhere to print to", places.a_full_terminal, "No space left on device",
            "free some space", "db export"),
]  # fmt: skip

MACHINE = [
    Row("GPUs are asked for, and there are none", f"tune --fabric cuda --gpus 2 {SHAPE}",
        NO_HARDWARE, "fabric cuda: torch", "--fabric host", place=places.no_gpus),
    Row("an AMD fabric without a GPU", f"bench --fabric rocm --gpus 2 {SHAPE}",
        NO_HARDWARE, "sees no GPU", "--fabric host", place=places.no_gpus),
    Row("more GPUs than there are", f"tune --gpus 8 {SHAPE}", NO_HARDWARE,
        "8 GPUs are asked for, 2 are there", "--gpus 2", place=places.two_gpus),
    Row("more GPUs than there are, to bench", f"bench --gpus 2,4 {SHAPE}", NO_HARDWARE,
        "4 GPUs are asked for, 2 are there", "--gpus 2", place=places.two_gpus),
    Row("more ranks than a CPU can be", "tune --fabric host --gpus 4096 --shapes 16x64x4096",
        NO_HARDWARE,
        "4096 ranks are asked for, the host fabric has at most", "--gpus", place=places.no_gpus),
    Row("a broken GPU driver", f"tune {SHAPE}", NO_HARDWARE,
        "there is a driver of NVIDIA, but torch", "taxfree doctor", place=places.a_broken_driver),
    Row("a broken GPU driver, to bench with", f"bench {SHAPE}", NO_HARDWARE,
        "there is a driver of NVIDIA, but torch", "taxfree doctor", place=places.a_broken_driver),
    Row("a broken GPU driver, looked at", "doctor --fabric cuda --json", NO_HARDWARE, "fabric cuda",
        "the report", place=places.a_broken_driver),
    Row("a second process has the GPUs' memory", f"tune {RANK} {SHAPE}", NO_HARDWARE,
        "out of GPU memory", "taxfree doctor",
        place=places.ranks_that_fail(
            "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')")),
    Row("a second process has the GPUs to itself", f"bench {RANK} {SHAPE}", NO_HARDWARE,
        "busy or unavailable", "taxfree doctor",
        place=places.ranks_that_fail(
            "RuntimeError('CUDA error: CUDA-capable device(s) is/are busy or unavailable\\n"
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1')")),
    Row("the GPU driver fails in a rank", f"explain {RANK} {SHAPE}", NO_HARDWARE,
        "a GPU or its driver fails: AcceleratorError: CUDA error", "taxfree doctor",
        place=places.ranks_that_fail("torch.AcceleratorError('CUDA error: unknown error')")),
]  # fmt: skip

INTERRUPTED = Row(
    "Ctrl-C while it measures",
    "tune --fabric host --gpus 2 --shapes 5x32x32 --variant push --trials 1000",
    ExitCode.INTERRUPTED, "interrupted", "continues from its finished trials",
)  # fmt: skip

ROWS = [*SHAPES, *MODELS, *OPTIONS, *FILES, *DATABASE, *MACHINE]

TENSORS = [
    Call("tensors of float32", "of_float32", USAGE, "a_shard is torch.float32, not float16", SEE),
    Call("two dtypes", "of_two_dtypes", USAGE, "weight is torch.bfloat16, a_shard not", SEE),
    Call("a bias of another dtype", "of_a_bias_of_another_dtype", USAGE, "bias is torch.float32",
         SEE),
    Call("another device", "on_another_device", USAGE, "weight is on meta, the fabric on cpu", SEE),
    Call("another device, after a right call", "on_another_device_later", USAGE,
         "weight is on meta, the fabric on cpu", SEE),
    Call("vectors", "vectors", USAGE, "must be matrices", SEE),
    Call("shards that do not fit the weight", "of_other_columns", USAGE,
         "the gathered A has 30 columns, weight 32 rows", SEE),
    Call("a weight without a stride of 1", "with_strides_over_one", USAGE, "neither stride", SEE),
    Call("a bias that is too long", "with_a_long_bias", USAGE, "bias is not a contiguous [32]",
         SEE),
    Call("a strided bias", "with_a_strided_bias", USAGE, "bias is not a contiguous [32]", SEE),
    Call("an m that the shards have not", "with_other_rows", USAGE, "a_shard has 5 rows", SEE),
    Call("gather_dim 2", "with_a_third_dimension", USAGE, "gather_dim is 2", SEE),
    Call("an output that is too small", "into_a_small_output", USAGE,
         "out is not a contiguous [5, 32]", SEE),
    Call("an output that is too small, after a right call", "into_a_small_output_later", USAGE,
         "out is not a contiguous [5, 32]", SEE),
    Call("a transposed output", "into_a_transposed_output", USAGE,
         "out is not a contiguous [5, 32]", SEE),
    Call("an output of float32", "into_an_output_of_float32", USAGE, "out is torch.float32", SEE),
    Call("a norm_weight that is too short", "with_a_short_norm_weight", USAGE,
         "norm_weight is not a contiguous [32]", SEE),
    Call("a norm_weight of float32", "of_a_norm_weight_of_float32", USAGE,
         "norm_weight is torch.float32", SEE),
    Call("a norm_weight on another device", "with_a_norm_weight_on_another_device", USAGE,
         "norm_weight is on meta", SEE),
    Call("an eps of 0", "normalised_without_eps", USAGE, "eps is 0.0", SEE),
    Call("an eps that is 0 in float32", "normalised_by_a_small_eps", USAGE, "eps is 1e-50", SEE),
    Call("an eps that is no number", "normalised_by_no_number", USAGE, "eps is nan", SEE),
    Call("an output for one of two results", "normalised_into_one_output", USAGE,
         "out is not a contiguous [2, 5, 32]", SEE),
    Call("query heads that the key heads do not divide", "with_uneven_heads", USAGE,
         "q_heads=3 is not divisible by kv_heads=2", "each kv head serves the same number"),
    Call("a domain of float64", "of_a_domain_of_float64", USAGE, "u is torch.float64, not float32",
         SEE),
    Call("a domain that the ranks cannot share", "of_a_domain_that_ranks_cannot_share", USAGE,
         "2 ranks are no multiple of across=3", SEE),
    Call("no steps", "of_no_steps", USAGE, "steps is 0", SEE),
    Call("an output without room for norms", "into_an_output_without_norms", USAGE,
         "out holds no norms", "without norm_every"),
    Call("embedding tables of float64", "of_tables_of_float64", USAGE,
         "weight is torch.float64, not float16, bfloat16, float32", SEE),
    Call("embedding tables of all ranks on each", "of_tables_of_all_ranks", USAGE,
         "weight has 2 tables, the rank holds 1", SEE),
    Call("embedding rows of odd length", "of_rows_of_odd_length", USAGE, "dim is 3, must be even",
         "pad the rows"),
    Call("embedding tables between multiples of 16 bytes", "of_tables_between_16_bytes", USAGE,
         "not contiguous and aligned to 16 bytes", "weight.clone("),
    Call("indices of int64", "with_indices_of_int64", USAGE, "indices is torch.int64", SEE),
    Call("room for indices that bags do not share evenly", "with_room_that_bags_do_not_share",
         USAGE, "room for 5 indices of a table, must be a multiple of batch=2", SEE),
    Call("a mean of weighted rows", "with_weights_of_a_mean", USAGE,
         "a mean of weighted rows is not defined", "mode='sum'"),
    Call("a pooling that is none", "with_another_pooling", USAGE,
         "mode is 'max', must be one of sum, mean", SEE),
    Call("a gradient of weights of rows", "with_gradients_of_weights", FAILED,
         "per_sample_weights get no gradient", "detach them"),
    Call("different sizes on different ranks", "with_different_sizes", USAGE, "rank 1",
         "all ranks make the same calls"),
    Call("different dtypes on different ranks", "with_different_dtypes", USAGE, "rank 1",
         "all ranks make the same calls"),
    Call("wrong tensors on one rank: that rank", "with_wrong_tensors_on_one_rank", USAGE,
         "weight is torch.bfloat16", SEE, ranks=(1,)),
    Call("wrong tensors on one rank: its peer", "with_wrong_tensors_on_one_rank", PEER_LOST,
         "rank 0 timed out waiting", "all ranks make the same calls", ranks=(0,)),
    Call("a rank that does not call", "on_one_rank_alone", PEER_LOST, "rank 0 waited 1.5 s for",
         "then `reset` on all ranks", ranks=(0,)),
    Call("a problem of another world size", "prepare_for_other_ranks", USAGE,
         "is for 4 ranks, this group has 2", "world_size=2"),
    Call("a dict for a problem", "prepare_no_problem", USAGE, "is no problem",
         "taxfree.AllGatherMatmul"),
    Call("K is not divisible by the ranks", "a_problem_that_does_not_split", FAILED,
         "k=33 is not divisible by 2 ranks", "each rank holds k / world_size columns"),
    Call("no record under TAXFREE_STRICT", "strictly_without_a_record", FAILED,
         "no record of its own", "run `taxfree tune`"),
    Call("a heap of no bytes", "init_on_no_memory", USAGE, "heap_bytes is 0", "leave heap_bytes"),
    Call("a heap that is too small", "init_on_a_small_heap", FAILED,
         "the symmetric heap has 1000 bytes left", "give a larger heap_bytes"),
    Call("True for a timeout", "init_with_a_flag_for_a_time", USAGE, "timeout_s is True",
         "leave timeout_s"),
    Call("a negative timeout", "init_without_time", USAGE, "timeout_s is -1.0", "leave timeout_s"),
    Call("TAXFREE_TIMEOUT=soon on one rank: that rank", "init_with_a_wrong_variable_on_one_rank",
         USAGE, "TAXFREE_TIMEOUT=soon", "TAXFREE_TIMEOUT=30", ranks=(1,)),
    Call("TAXFREE_TIMEOUT=soon on one rank: its peer", "init_with_a_wrong_variable_on_one_rank",
         FAILED, "rank 1: TAXFREE_TIMEOUT=soon", "TAXFREE_TIMEOUT=30", ranks=(0,)),
    Call("a database that is text", "init_from_text", FAILED, "is not a SQLite database",
         "point --db"),
    Call("a database of a newer schema", "init_from_a_newer_database", FAILED, "has schema 2",
         "update taxfree"),
    Call("a group without a runtime", "use_a_group_without_a_runtime", USAGE,
         "no taxfree runtime on group 'nobodys'", "call taxfree.init() first"),
]  # fmt: skip
