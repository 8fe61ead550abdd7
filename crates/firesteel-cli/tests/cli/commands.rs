use crate::support::{argument, firesteel, golden_path, refusal, stdout};
use insta::assert_snapshot;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};

const SPARK_TINY: &str = "models/spark-tiny";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn export(out: &Path, options: &[&str]) -> String {
    stdout(&[&["export", SPARK_TINY, "--out", argument(out)], options].concat())
}

/// The text with `folder` shown as FOLDER.
fn placeless(text: &str, folder: &Path) -> String {
    text.replace(argument(folder), "FOLDER")
}

/// The value with every number, string and boolean replaced by its type, and lists cut to their
/// first element.
fn shape(value: &Value) -> Value {
    match value {
        Value::Null => Value::Null,
        Value::Bool(_) => json!("boolean"),
        Value::Number(_) => json!("number"),
        Value::String(_) => json!("string"),
        Value::Array(items) => items.iter().take(1).map(shape).collect(),
        Value::Object(fields) => {
            let shape = |(key, value): (&String, &Value)| match key.as_str() {
                // Null where both sides are identical, which depends on the machine.
                "db" => (key.clone(), json!("number or null")),
                _ => (key.clone(), shape(value)),
            };
            fields.iter().map(shape).collect()
        }
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap()
}

fn help(verb: &[&str]) -> String {
    let text = stdout(&[verb, &["--help"]].concat());
    // Some lines of the long form hold nothing but spaces.
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

#[test]
fn help_of_the_program() {
    assert_snapshot!(help(&[]), @"
    Takes an on-device language model from its published checkpoint to the phone

    Usage: firesteel <COMMAND>

    Commands:
      inspect    Show what a checkpoint, a config.json, an artifact or a compiled artifact is
      synth      Write a checkpoint of a published shape with random weights
      export     Write the static decode-step graph of a checkpoint
      calibrate  Learn the ranges of a step's values from text
      quantize   Write a model quantized: as a GGUF file, or as a step's graph in integers
      compile    Compile artifacts for the NPU of a phone and audit what the compiler made of them
      check      Check the numbers: tensors step by step, what a text and prompts become, what a device computed
      profile    Tell what a step costs on a device, without the device
      generate   Generate text
      bench      Measure this program on this machine
      setup      Install a pinned library into the cache folder
      help       Print this message or the help of the given subcommand(s)

    Options:
      -h, --help     Print help
      -V, --version  Print version
    ");
    assert_snapshot!(stdout(&["--version"]).replace(env!("CARGO_PKG_VERSION"), "VERSION"), @"firesteel VERSION");
}

#[test]
fn help_of_inspect() {
    assert_snapshot!(help(&["inspect"]), @"
    Show what a checkpoint, a config.json, an artifact or a compiled artifact is

    Usage: firesteel inspect [OPTIONS] <PATH>

    Arguments:
      <PATH>  Checkpoint folder, GGUF file, config.json, artifact or compiled artifact

    Options:
          --context <N,N,…>  Contexts to give the KV cache's memory for [default: 4096 32768 131072 1048576]
          --verify           Read all files of an artifact and compare them with their hashes
          --json             Print JSON
      -h, --help             Print help
    ");
}

#[test]
fn help_of_synth() {
    assert_snapshot!(help(&["synth"]), @"
    Write a checkpoint of a published shape with random weights.

    Equal options write equal bytes, on any number of threads.

    Usage: firesteel synth [OPTIONS] --preset <NAME> --out <DIR>

    Options:
          --preset <NAME>
              Shape: spark-x2.5-1.7b, spark-x2.5-4b, qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b

          --layers <N>
              Keep only the first N layers

          --dtype <DTYPE>
              Element type of the weights

              [default: bf16]
              [possible values: bf16, f16, f32]

          --outliers
              Give some channels massive activations, as trained models have

          --seed <SEED>
              Start of the random numbers

              [default: 0]

          --out <DIR>
              Folder to write; it must not exist

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn help_of_export() {
    assert_snapshot!(help(&["export"]), @"
    Write the static decode-step graph of a checkpoint.

    The output folder has model.onnx with external data, manifest.json with every name, shape and type, and the tokenizer. It appears complete or not at all.

    Usage: firesteel export [OPTIONS] --out <DIR> <CHECKPOINT>

    Arguments:
      <CHECKPOINT>
              Checkpoint folder or GGUF file; with --random-weights also a config.json or a preset's name

    Options:
          --out <DIR>
              Folder to write

          --context <N>
              Entries of a full-attention layer's cache

              [default: 1024]

          --layers <all|sliding|full|A:B>
              Layers: all, sliding or full (the first layer of that type), or A:B

              [default: all]

          --no-lm-head
              Leave out the final norm and the vocabulary projection; the output is `hidden`

          --cache-layout <CACHE_LAYOUT>
              How sliding layers keep their window; auto is ring for sliding and roll for full layers

              [default: auto]
              [possible values: auto, ring, roll]

          --gelu <GELU>
              Form of the GELU activation; the checkpoints were trained with exact

              [default: exact]
              [possible values: exact, tanh, sigmoid]

          --tokens <T>
              Tokens of a step: 1 decodes, more prefill

              [default: 1]

          --logits <LOGITS>
              Logits of the last token or of all tokens of a step

              [default: last]
              [possible values: last, all]

          --head-shards <N>
              Write the vocabulary projection as N graphs of their own

              [default: 1]

          --precision <PRECISION>
              Number format of weights, activations, inputs and outputs

              [default: fp32]
              [possible values: fp32, fp16]

          --dialect <DIALECT>
              Who reads the graph: portable (opset 18, decomposed) or qnn (opset 23, fused spellings)

              [default: portable]
              [possible values: portable, qnn]

          --random-weights
              Random weights of the config's shape, for profiling

          --seed <SEED>
              Start of the random weights

              [default: 0]

          --embedding
              Also write the embedding table as a raw file for hosts

          --force
              Replace an existing artifact

          --check
              Check what was written against the checkpoint with the runners that are compiled in

          --json
              Print a JSON report

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn help_of_check() {
    assert_snapshot!(help(&["check"]), @"
    Check the numbers: tensors step by step, what a text and prompts become, what a device computed

    Usage: firesteel check <COMMAND>

    Commands:
      step      Compare the tensors of two runners, step by step
      fidelity  Compare what two runners say of a text and of prompts
      outputs   Compare what a device computed with what its kit expects
      help      Print this message or the help of the given subcommand(s)

    Options:
      -h, --help  Print help
    ");
}

#[test]
fn help_of_check_step() {
    assert_snapshot!(help(&["check", "step"]), @"
    Compare the tensors of two runners, step by step.

    Both get the same tokens; logits, hidden state after each layer, new keys and new values are compared. Exit code 1 when something is below its bar.

    Usage: firesteel check step [OPTIONS] --against <CHECKPOINT|ARTIFACT> <PATH>

    Arguments:
      <PATH>
              Artifact (or checkpoint) to check

    Options:
          --against <CHECKPOINT|ARTIFACT>
              Checkpoint (or artifact) that is right

          --graph <NAME>
              The step of a compiled artifact: decode, prefill-T [default: its first]

          --json
              Print a JSON report

          --runner <RUNNER>
              Who executes what is checked [default: evaluator for an artifact, engine for a checkpoint, htp for what is compiled]

              Possible values:
              - cpu:       The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights
              - engine:    The reference engine in f64, from a checkpoint
              - evaluator: The graph evaluator, from an artifact
              - ort:       ONNX Runtime on the CPU, from an artifact
              - htp:       The emulator of the HTP, from a compiled artifact

          --against-runner <AGAINST_RUNNER>
              Who executes what is right [default: engine for a checkpoint, evaluator for an artifact]

              Possible values:
              - cpu:       The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights
              - engine:    The reference engine in f64, from a checkpoint
              - evaluator: The graph evaluator, from an artifact
              - ort:       ONNX Runtime on the CPU, from an artifact
              - htp:       The emulator of the HTP, from a compiled artifact

          --ort <PATH>
              ONNX Runtime library, or a folder that holds it; else FIRESTEEL_ORT, else what `firesteel setup ort` installed

          --memory-limit <MIB>
              Memory of the process that compiles or emulates the HTP, in MiB [default: nine tenths of what is free]

          --time-limit <S>
              Time of that process, in seconds [default: 3600]

          --prompt <FILE>
              File with the text to run, or conversations where it ends in .jsonl [default: a text that is built in]

          --ids <ID,ID,…>
              Token ids to run

          --steps <N>
              Most tokens to run with teacher forcing

              [default: 96]

          --greedy <N>
              Tokens of the greedy continuation; 0 for none [default: 32]

          --greedy-prompt <N>
              Prompt tokens before the greedy continuation, at most half of the context [default: 16]

          --min-snr <DB>
              SNR in dB that logits, entries and the state after each layer must reach, each over all steps [default: 110, 100 on ort and cpu, 40 for fp16, 35 for an approximate GELU, 30 for 8-bit weights, 10 for 4-bit weights or 8-bit activations]

          --min-greedy <SHARE>
              Share of the greedy continuation, ties left out, that must agree, such as 1

              [default: 0]

          --tie-margin <GAP>
              Logit gap below which a greedy choice is a tie

              [default: 0.001]

          --no-layers
              Leave out the hidden state after each layer

          --record
              Write the result into the manifest of the compiled artifact that is checked

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn help_of_check_fidelity() {
    assert_snapshot!(help(&["check", "fidelity"]), @"
    Compare what two runners say of a text and of prompts.

    Each side is run for itself, with its own embedding. Exit code 1 when something is beyond its bar.

    Usage: firesteel check fidelity [OPTIONS] --against <CHECKPOINT|ARTIFACT> <--text <FILE>|--prompts <FILE>> <PATH>

    Arguments:
      <PATH>
              Artifact (or checkpoint) to check

    Options:
          --against <CHECKPOINT|ARTIFACT>
              Checkpoint (or artifact) that is right

          --graph <NAME>
              The step of a compiled artifact: decode, prefill-T [default: its first]

          --json
              Print a JSON report

          --runner <RUNNER>
              Who executes what is checked [default: evaluator for an artifact, engine for a checkpoint, htp for what is compiled]

              Possible values:
              - cpu:       The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights
              - engine:    The reference engine in f64, from a checkpoint
              - evaluator: The graph evaluator, from an artifact
              - ort:       ONNX Runtime on the CPU, from an artifact
              - htp:       The emulator of the HTP, from a compiled artifact

          --against-runner <AGAINST_RUNNER>
              Who executes what is right [default: engine for a checkpoint, evaluator for an artifact]

              Possible values:
              - cpu:       The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights
              - engine:    The reference engine in f64, from a checkpoint
              - evaluator: The graph evaluator, from an artifact
              - ort:       ONNX Runtime on the CPU, from an artifact
              - htp:       The emulator of the HTP, from a compiled artifact

          --ort <PATH>
              ONNX Runtime library, or a folder that holds it; else FIRESTEEL_ORT, else what `firesteel setup ort` installed

          --memory-limit <MIB>
              Memory of the process that compiles or emulates the HTP, in MiB [default: nine tenths of what is free]

          --time-limit <S>
              Time of that process, in seconds [default: 3600]

          --text <FILE>
              Text file, or conversations where it ends in .jsonl: compare logits, KL, perplexity and most probable tokens over it

          --prompts <FILE>
              File of prompts, one a line, or of conversations where it ends in .jsonl: compare greedy continuations of --greedy tokens

          --tokens <N>
              Most tokens of --text [default: all]

          --sequence <N>
              Most tokens of a sequence that --text is cut into, or each of its conversations [default: 512, or the context of an artifact where that is shorter]

          --near-tie <GAP>
              Logit gap below which another choice of --text or --prompts is a near tie

              [default: 0.05]

          --kv <FORMAT>
              What is checked stores keys and values in this format on the cpu runner: f32, f16 or q8 [default: f16]

          --against-kv <FORMAT>
              What is right stores keys and values in this format on the cpu runner: f32, f16 or q8 [default: f32]

          --greedy <N>
              Tokens of a greedy continuation of --prompts [default: 32]

          --min-snr <DB>
              Smallest SNR in dB of the logits over --text

          --max-kl <NATS>
              Largest mean KL divergence over --text, in nats

          --max-perplexity-change <SHARE>
              Largest change of the perplexity of --text, as a share: 0.005 is half a percent

          --min-exact <SHARE>
              Smallest share of --prompts that are continued exactly, near ties left out: 1 is all

          --min-kept <SHARE>
              Smallest mean share of a continuation of --prompts before it differs, near ties left out

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn help_of_check_outputs() {
    assert_snapshot!(help(&["check", "outputs"]), @"
    Compare what a device computed with what its kit expects.

    Exit code 1 when something is below its bar.

    Usage: firesteel check outputs [OPTIONS] <KIT> <OUTPUTS>

    Arguments:
      <KIT>
              Folder that `firesteel profile phone-kit` wrote

      <OUTPUTS>
              What a device computed from its inputs, as qnn-net-run writes it: GRAPH/Result_N/TENSOR.raw

    Options:
          --min-snr <DB>
              SNR in dB that logits and entries must reach, each over all steps [default: that of the kit]

          --tie-margin <GAP>
              Logit gap below which the most probable tokens are a tie

              [default: 0.001]

          --json
              Print a JSON report

      -h, --help
              Print help (see a summary with '-h')
    ");
}

#[test]
fn help_of_generate() {
    assert_snapshot!(help(&["generate"]), @r#"
    Generate text.

    The text goes to stdout as it is made, times go to stderr.

    Usage: firesteel generate [OPTIONS] <PATH>

    Arguments:
      <PATH>
              Checkpoint or artifact

    Options:
          --prompt <TEXT>
              The prompt; with --chat the user's message

          --prompt-file <FILE>
              File with the prompt

          --chat
              Put the prompt through the chat template

          --interactive
              Chat turn by turn: each line of stdin is a message of the user, after the prompt if there is one

          --system <TEXT>
              System message of the chat

          --tools <FILE>
              JSON file with the tools that the chat may call, as in the OpenAI interface

          --messages <FILE>
              JSON file with a whole conversation: {"messages": […], "tools": […]}

          --no-thinking
              Let the model answer without thinking first

          --max-tokens <N>
              Most tokens to generate

              [default: 256]

          --temperature <TEMPERATURE>
              Divides the logits; 0 takes the most probable token [default: the model's advice]

          --top-p <TOP_P>
              Keep the most probable tokens up to this probability [default: the model's advice]

          --top-k <TOP_K>
              Keep this many of the most probable tokens; 0 or -1 keeps all [default: the model's advice]

          --seed <SEED>
              Start of the random numbers

              [default: 0]

          --prompt-lookup [<N>]
              Run up to N tokens at once where the text repeats itself; the text stays the same

          --min-p <MIN_P>
              Keep the tokens at least this times as probable as the most probable one [default: the model's advice]

          --repetition-penalty <REPETITION_PENALTY>
              Divides the logits of tokens in prompt or text; 1 changes nothing [default: the model's advice]

          --presence-penalty <PRESENCE_PENALTY>
              Is taken from the logits of tokens in the text

              [default: 0]

          --frequency-penalty <FREQUENCY_PENALTY>
              Is taken from a logit for each time that the token is in the text

              [default: 0]

          --logit-bias <ID=BIAS>
              Is added to the logits of these ids

          --bad-word <TEXT>
              Text that is not to be generated; may be repeated

          --min-tokens <N>
              Fewest tokens before the model may end [default: the model's advice]

          --stop <TEXT>
              Stop before this text; may be repeated

          --stop-id <ID>
              Stop at this id; may be repeated

          --top-logprobs <N>
              Print the log-probabilities of each token and of the N most probable ones; needs --json

          --step-stats <DIR>
              Write a file with a line of JSON for each step, and a summary, to this folder; none when it is empty

              [env: FIRESTEEL_STEP_STATS_DIR=]

          --runner <RUNNER>
              Who executes the steps [default: cpu for a checkpoint, evaluator for an artifact]

              Possible values:
              - cpu:       The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights
              - engine:    The reference engine in f64, from a checkpoint
              - evaluator: The graph evaluator, from an artifact
              - ort:       ONNX Runtime on the CPU, from an artifact
              - htp:       The emulator of the HTP, from a compiled artifact

          --ort <PATH>
              ONNX Runtime library, or a folder that holds it; else FIRESTEEL_ORT, else what `firesteel setup ort` installed

          --memory-limit <MIB>
              Memory of the process that compiles or emulates the HTP, in MiB [default: nine tenths of what is free]

          --time-limit <S>
              Time of that process, in seconds [default: 3600]

          --kv <FORMAT>
              The cpu runner stores keys and values in this format: f32, f16 or q8 [default: f16]

          --context <N>
              Context of a checkpoint; an artifact has its own [default: the prompt and --max-tokens; 4096 with --interactive]

          --json
              Print JSON with ids, text, stop reason and times, at the end of each answer

      -h, --help
              Print help (see a summary with '-h')
    "#);
}

#[test]
fn help_of_bench() {
    assert_snapshot!(help(&["bench"]), @"
    Measure this program on this machine

    Usage: firesteel bench <COMMAND>

    Commands:
      export   Export against a plain writer of the same bytes, and the memory it takes
      kernels  Every kernel against scalar and against the read bandwidth
      decode   Prompt and decoding speed of a checkpoint, against the read bandwidth
      qnn      What the compiler for a phone's NPU plans for layers spelled in different ways
      sampler  Picking a token against the time of a step
      help     Print this message or the help of the given subcommand(s)

    Options:
      -h, --help  Print help
    ");
    assert_snapshot!(help(&["bench", "export"]), @"
    Export against a plain writer of the same bytes, and the memory it takes

    Usage: firesteel bench export [OPTIONS] [CHECKPOINT]

    Arguments:
      [CHECKPOINT]  Checkpoint to export [default: one that is made, see --preset]

    Options:
          --preset <PRESET>  Shape of the checkpoint that is made [default: spark-x2.5-1.7b]
          --dtype <DTYPE>    Element type of the checkpoint that is made [default: bf16] [possible values: bf16, f16, f32]
          --fp32             Export in 32 bits instead of 16
          --runs <RUNS>      Pairs of runs; an even number [default: 6]
          --rest <SECONDS>   Seconds that the disk rests before each run: space that was freed goes back to it after some, and a writer that takes it again before that is much faster or slower [default: 15]
          --dir <DIR>        Folder for what is written; it is removed again [default: .]
          --json             Print JSON
      -h, --help             Print help
    ");
}

#[test]
fn help_of_setup() {
    assert_snapshot!(help(&["setup"]), @"
    Install a pinned library into the cache folder

    Usage: firesteel setup <COMMAND>

    Commands:
      ort   ONNX Runtime, from its PyPI wheel through pip
      qnn   Qualcomm's compiler and emulator for the HTP, from the PyPI wheel of ONNX Runtime's QNN plugin through pip; under Qualcomm's licence, which is kept beside it
      help  Print this message or the help of the given subcommand(s)

    Options:
      -h, --help  Print help
    ");
    assert_snapshot!(help(&["setup", "ort"]), @"
    ONNX Runtime, from its PyPI wheel through pip

    Usage: firesteel setup ort [OPTIONS]

    Options:
          --python <PATH>  Python whose pip fetches the wheel [default: python3]
          --force          Install again what is installed already
      -h, --help           Print help
    ");
}

#[test]
fn inspect_a_checkpoint() {
    assert_snapshot!(stdout(&["inspect", SPARK_TINY]), @"
    models/spark-tiny: spark2_5
    2889984 parameters, hidden 256, feed-forward 512, 4 heads over 2 key/value heads of 64, vocabulary 2048, up to 4096 positions
    layers             count  window  rope theta  rotary dims
    sliding_attention      3      64       10000     64 of 64
    full_attention         1       -     5000000     16 of 64
    head tied; weights: 34 in bf16
    layer                                           weight  dtype       shape
    0 (sliding_attention)           input_layernorm.weight   bf16       [256]
    0 (sliding_attention)      self_attn.q_k_v_proj.weight   bf16  [512, 256]
    0 (sliding_attention)          self_attn.g_proj.weight   bf16    [4, 256]
    0 (sliding_attention)        self_attn.out_proj.weight   bf16  [256, 256]
    0 (sliding_attention)  post_attention_layernorm.weight   bf16       [256]
    0 (sliding_attention)             mlp.gate_proj.weight   bf16  [512, 256]
    0 (sliding_attention)               mlp.up_proj.weight   bf16  [512, 256]
    0 (sliding_attention)             mlp.down_proj.weight   bf16  [256, 512]
    3 (full_attention)              input_layernorm.weight   bf16       [256]
    3 (full_attention)         self_attn.q_k_v_proj.weight   bf16  [512, 256]
    3 (full_attention)             self_attn.g_proj.weight   bf16    [4, 256]
    3 (full_attention)           self_attn.out_proj.weight   bf16  [256, 256]
    3 (full_attention)     post_attention_layernorm.weight   bf16       [256]
    3 (full_attention)                mlp.gate_proj.weight   bf16  [512, 256]
    3 (full_attention)                  mlp.up_proj.weight   bf16  [512, 256]
    3 (full_attention)                mlp.down_proj.weight   bf16  [256, 512]
    weights          bytes       MiB
    stored         5779968   5.5 MiB
    f32           11559936  11.0 MiB
    f16, bf16      5779968   5.5 MiB
    int8 per row   2937344   2.8 MiB
    int4 per row   1495552   1.4 MiB
    KV at 16 bits         ring                  roll             all layers full
    context 4096       2193920    2.1 MiB    2195456    2.1 MiB          8388608     8.0 MiB
    context 32768     16873984   16.1 MiB   16875520   16.1 MiB         67108864    64.0 MiB
    context 131072    67205632   64.1 MiB   67207168   64.1 MiB        268435456   256.0 MiB
    context 1048576  536967680  512.1 MiB  536969216  512.1 MiB       2147483648  2048.0 MiB
    KV of the cpu runner        f16                    f32                     q8             marks at f16
    context 4096            2293760    2.2 MiB     4587520     4.4 MiB    1218560    1.2 MiB        290304  0.3 MiB
    context 32768          16973824   16.2 MiB    33947648    32.4 MiB    9017344    8.6 MiB        290304  0.3 MiB
    context 131072         67305472   64.2 MiB   134610944   128.4 MiB   35756032   34.1 MiB        290304  0.3 MiB
    context 1048576       537067520  512.2 MiB  1074135040  1024.4 MiB  285317120  272.1 MiB        290304  0.3 MiB
    ");
}

#[test]
fn inspect_a_checkpoint_as_json() {
    let mut report = parse(&stdout(&["inspect", SPARK_TINY, "--context", "64,63,1", "--json"]));
    let layers = report["layers"].as_array_mut().unwrap();
    assert_eq!(layers.len(), 4);
    let kinds: Vec<&str> = layers.iter().map(|layer| layer["kind"].as_str().unwrap()).collect();
    let sliding = "sliding_attention";
    assert_eq!(kinds, [sliding, sliding, sliding, "full_attention"]);
    layers.truncate(1);
    layers[0]["weights"].as_array_mut().unwrap().truncate(3);
    assert_snapshot!(pretty(&report), @r#"
    {
      "path": "models/spark-tiny",
      "model_type": "spark2_5",
      "hidden_size": 256,
      "intermediate_size": 512,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 64,
      "vocab_size": 2048,
      "max_position_embeddings": 4096,
      "rms_norm_eps": 1e-6,
      "layer_kinds": [
        {
          "kind": "sliding_attention",
          "count": 3,
          "window": 64,
          "rope_theta": 10000.0,
          "rotary_dims": 64
        },
        {
          "kind": "full_attention",
          "count": 1,
          "window": null,
          "rope_theta": 5000000.0,
          "rotary_dims": 16
        }
      ],
      "layers": [
        {
          "layer": 0,
          "kind": "sliding_attention",
          "window": 64,
          "rope_theta": 10000.0,
          "rotary_dims": 64,
          "weights": [
            {
              "name": "model.layers.0.input_layernorm.weight",
              "dtype": "bf16",
              "shape": [
                256
              ]
            },
            {
              "name": "model.layers.0.self_attn.q_k_v_proj.weight",
              "dtype": "bf16",
              "shape": [
                512,
                256
              ]
            },
            {
              "name": "model.layers.0.self_attn.g_proj.weight",
              "dtype": "bf16",
              "shape": [
                4,
                256
              ]
            }
          ]
        }
      ],
      "head": "tied",
      "dtypes": {
        "bf16": 34
      },
      "parameters": 2889984,
      "weight_bytes": {
        "stored": 5779968,
        "f32": 11559936,
        "f16": 5779968,
        "int8_per_row": 2937344,
        "int4_per_row": 1495552
      },
      "kv": [
        {
          "context": 64,
          "bytes_per_element": 2,
          "ring": {
            "bytes": 129536,
            "mib": 0.12353515625
          },
          "roll": {
            "bytes": 131072,
            "mib": 0.125
          },
          "all_full": {
            "bytes": 131072,
            "mib": 0.125
          },
          "cpu": {
            "f32": {
              "caches": 262144,
              "marks": 0
            },
            "f16": {
              "caches": 131072,
              "marks": 0
            },
            "q8": {
              "caches": 69632,
              "marks": 0
            }
          }
        },
        {
          "context": 63,
          "bytes_per_element": 2,
          "ring": {
            "bytes": 129024,
            "mib": 0.123046875
          },
          "roll": {
            "bytes": 129024,
            "mib": 0.123046875
          },
          "all_full": {
            "bytes": 129024,
            "mib": 0.123046875
          },
          "cpu": {
            "f32": {
              "caches": 258048,
              "marks": 0
            },
            "f16": {
              "caches": 129024,
              "marks": 0
            },
            "q8": {
              "caches": 68544,
              "marks": 0
            }
          }
        },
        {
          "context": 1,
          "bytes_per_element": 2,
          "ring": {
            "bytes": 2048,
            "mib": 0.001953125
          },
          "roll": {
            "bytes": 2048,
            "mib": 0.001953125
          },
          "all_full": {
            "bytes": 2048,
            "mib": 0.001953125
          },
          "cpu": {
            "f32": {
              "caches": 4096,
              "marks": 0
            },
            "f16": {
              "caches": 2048,
              "marks": 0
            },
            "q8": {
              "caches": 1088,
              "marks": 0
            }
          }
        }
      ],
      "warnings": []
    }
    "#);
}

#[test]
fn inspect_tells_how_the_weights_are_stored() {
    for (name, line) in [
        ("mini", "head tied; weights: 66 in f32"),
        ("mini-untied", "head stored; weights: 67 in f32"),
        ("mini-bf16-sharded", "head tied; weights: 66 in bf16"),
        ("mini-f16", "head tied; weights: 66 in f16"),
    ] {
        let text = stdout(&["inspect", argument(&golden_path("spark").join(name))]);
        assert!(text.lines().any(|found| found == line), "{name}: {text}");
    }
}

/// Writes the config.json of a preset and inspects it.
fn inspect_preset(folder: &Path, name: &str) -> Value {
    let file = folder.join(format!("{name}.json"));
    std::fs::write(&file, firesteel_checkpoint::preset(name).unwrap().to_json()).unwrap();
    parse(&stdout(&["inspect", argument(&file), "--json"]))
}

#[test]
fn inspect_has_the_published_numbers() {
    let folder = tempfile::tempdir().unwrap();
    const MIB: u64 = 1 << 20;
    struct Published {
        name: &'static str,
        layers: [u64; 2],
        parameters: u64,
        entry: u64,
        /// Context, MiB of the hybrid cache (roll), MiB if all layers kept the context.
        kv: [(u64, u64, u64); 4],
    }
    let cases = [
        Published {
            name: "spark-x2.5-1.7b",
            layers: [21, 7],
            // 131072·2048 + 2048 + 28 · (12·256·2048 + 8·2048 + 2048² + 3·2048·6656 + 2·2048)
            parameters: 1_707_657_216,
            entry: 2048,
            kv: [
                (4096, 77, 224),
                (32_768, 469, 1792),
                (131_072, 1813, 7168),
                (1_048_576, 14_357, 57_344),
            ],
        },
        Published {
            name: "spark-x2.5-4b",
            layers: [27, 9],
            parameters: 4_112_079_360,
            entry: 4096,
            kv: [
                (4096, 198, 576),
                (32_768, 1206, 4608),
                (131_072, 4662, 18_432),
                (1_048_576, 36_918, 147_456),
            ],
        },
    ];
    for Published { name, layers, parameters, entry, kv } in cases {
        let report = inspect_preset(folder.path(), name);
        assert_eq!(report["parameters"], parameters, "{name}");
        assert_eq!(report["weight_bytes"]["f32"], 4 * parameters, "{name}");
        assert_eq!(report["weight_bytes"]["f16"], 2 * parameters, "{name}");
        assert_eq!(report["weight_bytes"]["stored"], Value::Null, "{name}");
        let kinds: Vec<&Value> =
            report["layer_kinds"].as_array().unwrap().iter().map(|kind| &kind["count"]).collect();
        assert_eq!(kinds, layers.each_ref(), "{name}");
        for ((context, hybrid, full), found) in kv.iter().zip(report["kv"].as_array().unwrap()) {
            let about = format!("{name} at {context}");
            assert_eq!(found["context"], *context, "{about}");
            assert_eq!(found["roll"]["bytes"], hybrid * MIB, "{about}");
            assert_eq!(found["roll"]["mib"], *hybrid as f64, "{about}");
            assert_eq!(found["all_full"]["bytes"], full * MIB, "{about}");
            assert_eq!(found["all_full"]["mib"], *full as f64, "{about}");
            // A ring holds one entry less in each sliding layer.
            assert_eq!(found["ring"]["bytes"], hybrid * MIB - layers[0] * entry, "{about}");
        }
    }
    let first = &inspect_preset(folder.path(), "spark-x2.5-1.7b")["kv"][0];
    assert_eq!(
        (&first["roll"]["bytes"], &first["ring"]["bytes"]),
        (&json!(80_740_352), &json!(80_697_344))
    );
    // In GiB, as published: 14.02 and 56, 36.05 and 144.
    assert_eq!(format!("{:.2} {:.2}", 14_357.0 / 1024.0, 36_918.0 / 1024.0), "14.02 36.05");
}

#[test]
fn inspect_a_config_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let config = firesteel_checkpoint::preset("spark-x2.5-4b").unwrap();
    std::fs::write(&file, config.to_json()).unwrap();
    let text = stdout(&["inspect", argument(&file)]);
    assert_snapshot!(placeless(&text, folder.path()), @"
    FOLDER/config.json: spark2_5
    4112079360 parameters, hidden 2560, feed-forward 10240, 16 heads over 4 key/value heads of 256, vocabulary 131072, up to 1048576 positions
    layers             count  window  rope theta  rotary dims
    sliding_attention     27     512       10000   256 of 256
    full_attention         9       -     5000000    64 of 256
    weights             bytes          MiB
    f32           16448317440  15686.3 MiB
    f16, bf16      8224158720   7843.2 MiB
    int8 per row   4118836224   3928.0 MiB
    int4 per row   2063627264   1968.0 MiB
    KV at 16 bits           ring                      roll               all layers full
    context 4096       207507456    197.9 MiB    207618048    198.0 MiB        603979776     576.0 MiB
    context 32768     1264472064   1205.9 MiB   1264582656   1206.0 MiB       4831838208    4608.0 MiB
    context 131072    4888350720   4661.9 MiB   4888461312   4662.0 MiB      19327352832   18432.0 MiB
    context 1048576  38711218176  36917.9 MiB  38711328768  36918.0 MiB     154618822656  147456.0 MiB
    KV of the cpu runner          f16                       f32                        q8               marks at f16
    context 4096            214695936    204.8 MiB    429391872    409.5 MiB    114057216    108.8 MiB     169537536  161.7 MiB
    context 32768          1271660544   1212.8 MiB   2543321088   2425.5 MiB    675569664    644.3 MiB     169537536  161.7 MiB
    context 131072         4895539200   4668.8 MiB   9791078400   9337.5 MiB   2600755200   2480.3 MiB     169537536  161.7 MiB
    context 1048576       38718406656  36924.8 MiB  77436813312  73849.5 MiB  20569153536  19616.3 MiB     169537536  161.7 MiB
    ");
}

#[test]
fn synth_writes_a_checkpoint_of_the_shape() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("checkpoint");
    let line =
        stdout(&["synth", "--preset", "spark-x2.5-1.7b", "--layers", "1", "--out", argument(&out)]);
    assert_eq!(line.trim_end(), argument(&out));
    assert_eq!(crate::support::names(folder.path()), ["checkpoint"]);
    assert_eq!(crate::support::names(&out), ["config.json", "model.safetensors"]);
    let report = parse(&stdout(&["inspect", argument(&out), "--json"]));
    // The embedding, the last norm and one layer of the published 1.7B shape.
    assert_eq!(report["parameters"], 268_435_456u64 + 2048 + 51_400_704);
    assert_eq!(report["weight_bytes"]["stored"], 2 * report["parameters"].as_u64().unwrap());
    assert_eq!(report["dtypes"], json!({"bf16": 10}));
}

#[test]
fn export_reports_what_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    let text = export(&out, &["--context", "256"]);
    assert_snapshot!(placeless(&text, folder.path()), @"
    wrote FOLDER/artifact
    4 layers from 0, context 256, 1 token a step, portable dialect, opset 18, f32
    model.onnx: 236 nodes, 33 Add, 18 Concat, 9 Div, 4 Erf, 25 Gemm, 8 MatMul, 58 Mul, 8 Neg, 9 ReduceMean, 29 Reshape, 4 Sigmoid, 4 Softmax, 14 Split, 9 Sqrt, 4 Transpose
    34 tensors, 11.0 MiB of data; KV at 16 bits 0.2 MiB instead of 0.5 MiB
    ");
    let text = export(&out, &["--force", "--json", "--layers", "sliding", "--no-lm-head"]);
    assert_snapshot!(placeless(&text, folder.path()), @r#"
    {
      "path": "FOLDER/artifact",
      "context": 1024,
      "tokens": 1,
      "layers": 1,
      "first_layer": 0,
      "layer_types": [
        "sliding_attention"
      ],
      "include_lm_head": false,
      "head": null,
      "tensors_read": 8,
      "dialect": "portable",
      "opset": 18,
      "dtype": "f32",
      "op_counts": {
        "model.onnx": {
          "Add": 8,
          "Concat": 4,
          "Div": 2,
          "Erf": 1,
          "Gemm": 6,
          "MatMul": 2,
          "Mul": 14,
          "Neg": 2,
          "ReduceMean": 2,
          "Reshape": 9,
          "Sigmoid": 1,
          "Softmax": 1,
          "Split": 3,
          "Sqrt": 2,
          "Transpose": 1
        }
      },
      "data_bytes": 2363392,
      "kv_bytes": {
        "hybrid": 32256,
        "uniform": 524288,
        "saved": 492032
      },
      "kv_bytes_per_element": 2,
      "unused_inputs": [
        "cos_full",
        "sin_full",
        "mask_full"
      ],
      "wide": "every tensor is f32",
      "check": null
    }
    "#);
    let text = stdout(&["inspect", argument(&out)]);
    assert_snapshot!(placeless(&text, folder.path()), @"
    artifact of spark2_5, portable dialect, opset 18, f32 values
    layers 0..1 of 4, context 1024, 1 token a step, head left out
    tensor     dtype           shape
    x            f32     [1, 1, 256]
    cos_sw       f32   [1, 1, 1, 64]
    sin_sw       f32   [1, 1, 1, 64]
    mask_sw      f32   [1, 1, 1, 64]
    k_cache_0    f32  [1, 2, 63, 64]
    v_cache_0    f32  [1, 2, 63, 64]
    hidden       f32     [1, 1, 256]
    k_new_0      f32   [1, 2, 1, 64]
    v_new_0      f32   [1, 2, 1, 64]
    not in this slice: cos_full, sin_full, mask_full
    wide tensors: every tensor is f32
    model.onnx: 8 Add, 4 Concat, 2 Div, 1 Erf, 6 Gemm, 2 MatMul, 14 Mul, 2 Neg, 2 ReduceMean, 9 Reshape, 1 Sigmoid, 1 Softmax, 3 Split, 2 Sqrt, 1 Transpose
    model.onnx.data: 2363392 bytes, 2.3 MiB
    KV at 16 bits: 32256 bytes, 0.0 MiB; all layers full: 524288 bytes, 0.5 MiB; this graph's inputs: 64512 bytes
    ");
    let manifest = parse(&stdout(&["inspect", argument(&out), "--json"]));
    let written = std::fs::read_to_string(out.join("manifest.json")).unwrap();
    assert_eq!(manifest, parse(&written));
    assert_snapshot!(pretty(&shape(&manifest)), @r#"
    {
      "format": "string",
      "format_version": "number",
      "tool_version": "string",
      "model": {
        "model_type": "string",
        "config_sha256": "string",
        "checkpoint": [
          {
            "name": "string",
            "bytes": "number",
            "sha256": "string"
          }
        ],
        "random_seed": null,
        "tensors_read": "number",
        "num_layers": "number",
        "eos_token_ids": [
          "number"
        ]
      },
      "options": {
        "tokens": "number",
        "context": "number",
        "layers": {
          "start": "number",
          "end": "number"
        },
        "cache_layout": "string",
        "logits": "string",
        "gelu": "string",
        "precision": "string",
        "dialect": "string",
        "head_shards": "number"
      },
      "opset": "number",
      "step": {
        "tokens": "number",
        "context": "number",
        "hidden_size": "number",
        "vocab_size": "number",
        "num_attention_heads": "number",
        "num_key_value_heads": "number",
        "head_dim": "number",
        "sliding_window": "number",
        "rope_sliding": {
          "theta": "number",
          "dims": "number"
        },
        "rope_full": null,
        "first_layer": "number",
        "layers": [
          {
            "kind": "string",
            "layout": "string",
            "cache_length": "number"
          }
        ],
        "logits": "string",
        "dtype": "string",
        "mask_value": "number",
        "inputs": [
          {
            "name": "string",
            "shape": [
              "number"
            ],
            "dtype": "string",
            "role": "string"
          }
        ],
        "outputs": [
          {
            "name": "string",
            "shape": [
              "number"
            ],
            "dtype": "string",
            "role": "string"
          }
        ]
      },
      "layer_types": [
        "string"
      ],
      "head": null,
      "unused_inputs": [
        "string"
      ],
      "wide": {
        "f32_values": [],
        "reason": "string"
      },
      "kv_bytes": {
        "hybrid": "number",
        "uniform": "number",
        "saved": "number",
        "bytes_per_element": "number",
        "graph_inputs": "number"
      },
      "graphs": [
        {
          "file": "string",
          "role": "string",
          "bytes": "number",
          "sha256": "string",
          "layer_hidden": [
            "string"
          ],
          "op_counts": {
            "Add": "number",
            "Concat": "number",
            "Div": "number",
            "Erf": "number",
            "Gemm": "number",
            "MatMul": "number",
            "Mul": "number",
            "Neg": "number",
            "ReduceMean": "number",
            "Reshape": "number",
            "Sigmoid": "number",
            "Softmax": "number",
            "Split": "number",
            "Sqrt": "number",
            "Transpose": "number"
          },
          "tags": [
            {
              "part": "string",
              "nodes": [
                "string"
              ]
            }
          ]
        }
      ],
      "data": [
        {
          "file": "string",
          "bytes": "number",
          "xxh3": "string"
        }
      ],
      "embedding": null,
      "copied": [
        {
          "name": "string",
          "bytes": "number",
          "sha256": "string"
        }
      ]
    }
    "#);
}

#[test]
fn export_with_check_has_both_reports() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    let report = parse(&export(&out, &["--context", "256", "--check", "--json"]));
    assert_eq!(report["check"]["passed"], true);
    assert_eq!(report["check"]["test"], "evaluator");
    assert_eq!(report["check"]["reference"], "engine");
    assert_eq!(report["check"]["tokens"], 96);
    let text = export(&out, &["--context", "256", "--check", "--force"]);
    let mut lines = text.lines();
    assert!(lines.next().unwrap().starts_with("wrote "), "{text}");
    assert_eq!(lines.next_back(), Some("passed: the bar over all steps is 110 dB"));
}

/// Numbers that depend on the machine, and the columns that they widen.
fn with_numbers_hidden(body: impl FnOnce()) {
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d+\.\d dB", "[N] dB");
    settings.add_filter(r"\d\.\d+e-?\d+", "[N]");
    settings.add_filter(r"(?m)^ort: .*$", "ort: [settings]");
    settings.add_filter(r" {2,}", "  ");
    settings.bind(body);
}

#[test]
fn check_reports() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    export(&out, &["--context", "256"]);
    let check = |options: &[&str]| {
        stdout(&[&["check", "step", argument(&out), "--against", SPARK_TINY], options].concat())
    };
    let text = check(&[]);
    with_numbers_hidden(|| {
        assert_snapshot!(text, @"
        evaluator against engine: 96 tokens in steps of 1, past the window of 64
        engine: gelu exact, arithmetic f64
          SNR  max difference
        after layer 0 (sliding_attention)  [N] dB  [N]
        after layer 1 (sliding_attention)  [N] dB  [N]
        after layer 2 (sliding_attention)  [N] dB  [N]
        after layer 3 (full_attention)  [N] dB  [N]
        new keys and values  [N] dB  [N]
        logits  [N] dB  [N]
        top-1 100.0 % (0 of 96 tokens are ties), top-5 100.0 %, KL [N] mean [N] max, top-20 log-probability difference [N]
        greedy after 16 tokens: 32 of 32 agree, 0 ties left out
        passed: the bar over all steps is 110 dB
        ")
    });
    let text = check(&[
        "--runner",
        "ort",
        "--steps",
        "80",
        "--greedy",
        "0",
        "--no-layers",
        "--min-snr",
        "100",
    ]);
    assert!(text.contains("graph_optimization disabled"), "{text}");
    with_numbers_hidden(|| {
        assert_snapshot!(text, @"
        ort against engine: 80 tokens in steps of 1, past the window of 64
        engine: gelu exact, arithmetic f64
        ort: [settings]
          SNR  max difference
        keys of layer 0 (sliding_attention)  [N] dB  [N]
        values of layer 0  [N] dB  [N]
        keys of layer 1 (sliding_attention)  [N] dB  [N]
        values of layer 1  [N] dB  [N]
        keys of layer 2 (sliding_attention)  [N] dB  [N]
        values of layer 2  [N] dB  [N]
        keys of layer 3 (full_attention)  [N] dB  [N]
        values of layer 3  [N] dB  [N]
        new keys and values  [N] dB  [N]
        logits  [N] dB  [N]
        top-1 100.0 % (0 of 80 tokens are ties), top-5 100.0 %, KL [N] mean [N] max, top-20 log-probability difference [N]
        greedy: not run
        passed: the bar over all steps is 100 dB
        ")
    });
    let report = parse(&check(&["--json"]));
    assert_eq!(report["steps"].as_array().unwrap().len(), 96);
    assert_eq!(report["layers"].as_array().unwrap().len(), 4);
    assert_eq!(report["greedy"]["agreed"], 32);
    assert_eq!(report["passed"], true);
    assert_snapshot!(pretty(&shape(&report)), @r#"
    {
      "reference": "string",
      "reference_settings": [
        [
          "string"
        ]
      ],
      "test": "string",
      "test_settings": [],
      "tokens": "number",
      "tokens_per_step": "number",
      "min_snr": "number",
      "min_greedy": "number",
      "output": {
        "db": "number or null",
        "max_abs": "number",
        "identical": "boolean",
        "count": "number"
      },
      "added": null,
      "entries": {
        "db": "number or null",
        "max_abs": "number",
        "identical": "boolean",
        "count": "number"
      },
      "logits": {
        "tokens": "number",
        "top1": "number",
        "ties": "number",
        "top5": "number",
        "kl_mean": "number",
        "kl_max": "number",
        "top20_logprob_max": "number"
      },
      "greedy": {
        "prompt_tokens": "number",
        "tokens": [
          "number"
        ],
        "agreed": "number",
        "ties": "number",
        "first_difference": null
      },
      "layers": [
        {
          "layer": "number",
          "kind": "string",
          "hidden": {
            "db": "number or null",
            "max_abs": "number",
            "identical": "boolean",
            "count": "number"
          },
          "keys": {
            "db": "number or null",
            "max_abs": "number",
            "identical": "boolean",
            "count": "number"
          },
          "values": {
            "db": "number or null",
            "max_abs": "number",
            "identical": "boolean",
            "count": "number"
          }
        }
      ],
      "steps": [
        {
          "position": "number",
          "output": {
            "db": "number or null",
            "max_abs": "number",
            "identical": "boolean",
            "count": "number"
          },
          "logits": {
            "reference_top": "number",
            "test_top": "number",
            "reference_gap": "number",
            "top5": "number",
            "kl": "number",
            "top20_logprob": "number"
          }
        }
      ],
      "first_bad": null,
      "passed": "boolean"
    }
    "#);
}

#[test]
fn check_refuses_or_tells_of_numbers_of_tokens_that_it_cannot_take() {
    let folder = tempfile::tempdir().unwrap();
    let (one, four) = (folder.path().join("one"), folder.path().join("four"));
    export(&one, &["--context", "48", "--layers", "0:4"]);
    export(&four, &["--context", "48", "--tokens", "4"]);
    let check = |path: &Path, extra: &[&str]| {
        let fixed = ["check", "step", argument(path), "--against", SPARK_TINY, "--no-layers"];
        firesteel(&[&fixed[..], extra].concat())
    };
    let refusals: [(&Path, &[&str], &str); 3] = [
        (
            &one,
            &["--steps", "0"],
            "error: --steps 0: a step takes 1 token; as many or more are accepted\n",
        ),
        (
            &four,
            &["--steps", "3"],
            "error: --steps 3: a step takes 4 tokens; as many or more are accepted\n",
        ),
        (
            &one,
            &["--greedy-prompt", "0"],
            "error: --greedy-prompt 0: a continuation needs something to continue; 1 or more \
             tokens are accepted, and --greedy 0 leaves it out\n",
        ),
    ];
    for (path, extra, expected) in refusals {
        let output = check(path, extra);
        assert_eq!(output.status.code(), Some(1), "{extra:?}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected);
    }
    // (options, what is said, where the continuation begins)
    let cases: [(&[&str], &str, &str); 4] = [
        (&["--greedy-prompt", "24", "--greedy", "24"], "", "greedy after 24 tokens"),
        (
            &["--greedy-prompt", "40"],
            "warning: the greedy continuation begins after 24 tokens, not after the 40 of \
             --greedy-prompt: it takes no more than there are, and half of the context of 48\n",
            "greedy after 24 tokens",
        ),
        (
            &["--greedy", "33"],
            "warning: the greedy continuation has 32 tokens, not the 33 of --greedy: the context \
             of 48 takes no more after 16 of the prompt\n",
            "greedy after 16 tokens",
        ),
        // What nobody asked for is shortened to what there is.
        (&["--ids", "5,6,7"], "", "greedy after 3 tokens"),
    ];
    for (extra, said, shown) in cases {
        let output = check(&one, &[&["--steps", "3"], extra].concat());
        assert_eq!(String::from_utf8(output.stderr).unwrap(), said, "{extra:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(shown), "{extra:?}: {text}");
    }
}

#[test]
fn check_fails_below_the_bar() {
    let folder = tempfile::tempdir().unwrap();
    let (right, wrong) = (folder.path().join("exact"), folder.path().join("sigmoid"));
    export(&right, &["--context", "128"]);
    export(&wrong, &["--context", "128", "--gelu", "sigmoid"]);
    let check = |bar: &str, extra: &[&str]| {
        let arguments = [
            "check",
            "step",
            argument(&wrong),
            "--against",
            argument(&right),
            "--steps",
            "8",
            "--min-snr",
            bar,
        ];
        firesteel(&[&arguments[..], extra].concat())
    };
    let output = check("100", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    let text = String::from_utf8(output.stdout).unwrap();
    with_numbers_hidden(|| {
        assert_snapshot!(text, @"
        evaluator against evaluator: 8 tokens in steps of 1, NOT past the window of 64
          SNR  max difference
        after layer 0 (sliding_attention)  [N] dB  [N]
        after layer 1 (sliding_attention)  [N] dB  [N]
        after layer 2 (sliding_attention)  [N] dB  [N]
        after layer 3 (full_attention)  [N] dB  [N]
        new keys and values  [N] dB  [N]
        logits  [N] dB  [N]
        top-1 100.0 % (0 of 8 tokens are ties), top-5 100.0 %, KL [N] mean [N] max, top-20 log-probability difference [N]
        greedy after 16 tokens: 32 of 32 agree, 0 ties left out
        first below 100 dB in a single step: layer 0 at position 0, [N] dB
        FAILED: the bar over all steps is 100 dB
        ")
    });
    let output = check("100", &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = parse(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(report["passed"], false);
    assert_eq!(report["first_bad"]["name"], "layer 0");
    assert_eq!(report["first_bad"]["position"], 0);
    assert_eq!(check("5", &[]).status.code(), Some(0));
}

/// Every refusal has exit code 1, says why on stderr and nothing on stdout.
#[test]
fn refusals() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| argument(&folder.path().join(name)).to_owned();
    let (out, artifact, chunk) = (path("out"), path("artifact"), path("chunk"));
    export(Path::new(&artifact), &["--context", "128"]);
    export(Path::new(&chunk), &["--context", "128", "--tokens", "4"]);
    let conversation = path("conversation.json");
    std::fs::write(&conversation, r#"{"messages": [{"role": "wizard", "content": "x"}]}"#).unwrap();
    let tools = path("tools.json");
    std::fs::write(&tools, "{}").unwrap();
    let words = path("words");
    std::fs::write(&words, "one two").unwrap();
    let mini = golden_path("spark/mini");
    let mini = argument(&mini);

    let to_out = |options: &[&str]| -> Vec<String> {
        let all = [&["export", SPARK_TINY, "--out", &out], options].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    let run = |arguments: &[&str]| -> Vec<String> {
        arguments.iter().map(|&argument| argument.to_owned()).collect()
    };
    let against = |options: &[&str]| -> Vec<String> {
        run(&[&["check", "step", &artifact, "--against", SPARK_TINY], options].concat())
    };
    let cases: Vec<(Vec<String>, &str)> = vec![
        // The command line.
        (run(&[]), "Usage: firesteel <COMMAND>"),
        (run(&["quantise"]), "unrecognized subcommand 'quantise'"),
        (run(&["inspect"]), "<PATH>"),
        (run(&["inspect", SPARK_TINY, "--contxt", "3"]), "unexpected argument '--contxt'"),
        (run(&["inspect", SPARK_TINY, "--context", "4k"]), "invalid value '4k'"),
        (run(&["synth", "--out", &out]), "--preset <NAME>"),
        (to_out(&["--cache-layout", "grow"]), "possible values: auto, ring, roll"),
        (to_out(&["--precision", "bf16"]), "possible values: fp32, fp16"),
        (to_out(&["--seed", "3"]), "--random-weights"),
        (run(&["generate", SPARK_TINY]), "--prompt <TEXT>"),
        (
            run(&["generate", SPARK_TINY, "--prompt", "a", "--prompt-file", "b"]),
            "cannot be used with",
        ),
        (run(&["generate", SPARK_TINY, "--prompt", "a", "--tools", &tools]), "--chat"),
        (against(&["--ids", "1,2", "--prompt", "b"]), "cannot be used with"),
        (against(&["--ids", "1,x"]), "invalid value 'x'"),
        // Paths.
        (run(&["inspect", "no-such-folder"]), "no-such-folder"),
        (run(&["inspect", &tools]), "model_type"),
        (
            run(&["inspect", "models/spark-tiny/model.safetensors"]),
            "in safetensors; give the folder",
        ),
        (run(&["export", "no-such-folder", "--out", &out]), "no-such-folder"),
        (run(&["export", &artifact, "--out", &out]), "neither model.safetensors nor"),
        (
            run(&["export", "models/spark-tiny/config.json", "--out", &out]),
            "accepted: the folder that holds config.json",
        ),
        (run(&["synth", "--preset", "spark-x2.5-1.7b", "--out", &artifact]), "exists already"),
        (run(&["generate", mini, "--prompt", "a"]), "tokenizer.json"),
        (run(&["generate", SPARK_TINY, "--messages", "none.json"]), "none.json"),
        // Options.
        (run(&["inspect", SPARK_TINY, "--context", "18446744073709551615"]), "overflow"),
        (
            run(&["synth", "--preset", "spark-x2.5-7b", "--out", &out]),
            "--preset spark-x2.5-7b is not known; accepted: spark-x2.5-1.7b, spark-x2.5-4b",
        ),
        (
            run(&["synth", "--preset", "spark-x2.5-4b", "--layers", "37", "--out", &out]),
            "cannot cut the model to 37 layers; accepted: 1 to 36",
        ),
        (to_out(&["--context", "0"]), "context is 0, but 1 to 16777216 is accepted"),
        (to_out(&["--context", "16777217"]), "context is 16777217, but 1 to 16777216 is accepted"),
        (to_out(&["--tokens", "0"]), "tokens is 0, but 1 to 16777216 is accepted"),
        (
            to_out(&["--tokens", "65", "--context", "64"]),
            "tokens is 65, but a step of more tokens than the context can hold never runs",
        ),
        (
            to_out(&["--layers", "3:3"]),
            "--layers 3:3: all, sliding, full or A:B with A < B <= 4 is accepted",
        ),
        (to_out(&["--layers", "2:5"]), "--layers 2:5: all, sliding, full or A:B"),
        (to_out(&["--layers", "first"]), "--layers first: all, sliding, full or A:B"),
        (to_out(&["--head-shards", "0"]), "--head-shards 0: 1 to the vocabulary size is accepted"),
        (to_out(&["--head-shards", "2049"]), "--head-shards 2049: 1 to the vocabulary size"),
        (
            to_out(&["--head-shards", "2", "--no-lm-head"]),
            "--head-shards 2: there is no head with --no-lm-head",
        ),
        (against(&["--ids", "7,2048"]), "id 2048 is outside the vocabulary of 2048"),
        (against(&["--min-snr", "nan"]), "--min-snr NaN: a finite number is accepted"),
        (against(&["--runner", "engine"]), "use --runner evaluator or --runner ort"),
        (against(&["--against-runner", "ort"]), "a checkpoint has no graph to run on ONNX Runtime"),
        (
            against(&["--runner", "ort", "--ort", "/no/such/library"]),
            "/no/such/library (from --ort)",
        ),
        (
            run(&["check", "step", &artifact, "--against", &chunk]),
            "the tokens a step of evaluator and evaluator differ: 4 against 1",
        ),
        (
            run(&["check", "step", &artifact, "--against", mini]),
            "hidden_size of the step is 256, but",
        ),
        (run(&["check", "step", mini, "--against", mini, "--prompt", &words]), "give --ids"),
        (
            run(&["generate", SPARK_TINY, "--messages", &conversation]),
            "expected one of `system`, `developer`, `user`, `assistant`, `tool`",
        ),
        (
            run(&["generate", SPARK_TINY, "--chat", "--prompt", "a", "--tools", &tools]),
            "tools.json is no JSON list of tools",
        ),
        (
            run(&["generate", SPARK_TINY, "--prompt", "a", "--temperature=-1"]),
            "temperature is -1, but a finite number from 0 is accepted",
        ),
        (
            run(&["generate", SPARK_TINY, "--prompt", "a", "--top-p", "1.5"]),
            "top_p is 1.5, but a number above 0 and at most 1 is accepted",
        ),
        (run(&["generate", SPARK_TINY, "--prompt", ""]), "the prompt is empty"),
        (run(&["generate", SPARK_TINY, "--prompt", "a", "--context", "0"]), "context is 0"),
        (
            run(&["generate", SPARK_TINY, "--prompt", "a", "--ort", "lib"]),
            "--ort does nothing, because nothing runs on ONNX Runtime or the emulator of the HTP",
        ),
        (
            against(&["--time-limit", "9"]),
            "--time-limit does nothing, because nothing runs on the emulator",
        ),
        (
            run(&["generate", &artifact, "--prompt", "a", "--context", "64"]),
            "--context 64: the artifact has a context of 128; export it with another",
        ),
        (
            run(&["generate", &artifact, "--prompt", "a", "--kv", "q8"]),
            "--kv q8 does nothing on the evaluator, whose caches are those of the step",
        ),
        (
            run(&["generate", SPARK_TINY, "--prompt", "a", "--runner", "engine", "--kv", "f32"]),
            "--kv f32 does nothing on the engine",
        ),
        (run(&["bench", "export", "--runs", "0"]), "--runs 0: an even number is needed"),
        (run(&["bench", "decode", SPARK_TINY, "--chunk", "0"]), "--chunk and --runs: 1 or more"),
        (
            run(&["bench", "decode", SPARK_TINY, "--position", "90", "--context", "100"]),
            "--context 100: 154 tokens are measured, and have to fit",
        ),
        (run(&["bench", "kernels", "--shape", "1,2"]), "--shape takes M,K,N"),
        (run(&["bench", "kernels", "--heads", "8,0,64"]), "--heads takes H,KV,D"),
        (
            run(&["bench", "kernels", "--heads", "8,3,256"]),
            "--heads: attention of 8 heads over 3 key/value heads of 256: heads must be",
        ),
        (run(&["bench", "kernels", "--threads", "0"]), "--threads 0: 1 or more is accepted"),
        (
            run(&["bench", "decode", SPARK_TINY, "--threads", "0"]),
            "--threads 0: 1 or more is accepted",
        ),
        (
            run(&["bench", "kernels", "--entries", "99999999"]),
            "--entries 99999999: caches of up to 2^28 elements",
        ),
    ];
    let mut wrong = Vec::new();
    for (arguments, expected) in &cases {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = firesteel(&arguments);
        let talk = String::from_utf8(output.stderr).unwrap();
        if output.status.code() != Some(1) || !output.stdout.is_empty() || !talk.contains(expected)
        {
            wrong.push(format!("{arguments:?}: {:?}, {expected:?} in {talk}", output.status));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(!Path::new(&out).exists());
    let mut left = crate::support::names(folder.path());
    left.retain(|name| name.starts_with('.'));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn errors_begin_with_what_was_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let talk = refusal(&["export", SPARK_TINY, "--context", "0", "--out", argument(&out)]);
    let expected = format!(
        "error: {} was not written: context is 0, but 1 to 16777216 is accepted\n",
        out.display()
    );
    assert_eq!(talk, expected);
}

/// A reader that has left is no error, whatever the verb.
#[test]
fn a_closed_pipe_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let out = argument(&out);
    for arguments in [
        &["--help"][..],
        &["inspect", SPARK_TINY],
        &["inspect", SPARK_TINY, "--json"],
        &["export", SPARK_TINY, "--out", out, "--context", "64"],
        &["check", "step", out, "--against", SPARK_TINY, "--steps", "4", "--greedy", "0"],
        &["generate", SPARK_TINY, "--prompt", "One", "--max-tokens", "20"],
        &["generate", SPARK_TINY, "--prompt", "One", "--max-tokens", "2", "--json"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_firesteel"))
            .args(arguments)
            .current_dir(crate::support::ROOT)
            .stdout(Stdio::from(writer))
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let talk = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), talk.as_str()), (Some(0), ""), "{arguments:?}");
    }
    // What was asked for is there all the same.
    assert!(Path::new(out).join("manifest.json").is_file());
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(["inspect", SPARK_TINY])
        .current_dir(crate::support::ROOT)
        .stdout(Stdio::from(full))
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(talk.contains("standard output: No space left on device"), "{talk}");
}

/// What cannot fit on the disk does not begin.
#[test]
fn a_disk_that_is_too_small_is_told_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut config: Value =
        parse(&std::fs::read_to_string(golden_path("spark/mini").join("config.json")).unwrap());
    config["hidden_size"] = (1u64 << 24).into();
    config["intermediate_size"] = (1u64 << 24).into();
    let path = folder.path().join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let outs = folder.path().join("outs");
    let out = outs.join("artifact");
    let arguments = ["export", argument(&path), "--random-weights", "--out", argument(&out)];
    let talk = refusal(&arguments);
    let told = [&format!("{}: ", out.display()), " bytes are needed, but only ", " are free on"];
    assert!(told.iter().all(|part| talk.contains(part)), "{talk}");
    assert_eq!(std::fs::read_dir(outs).unwrap().count(), 0);
}
