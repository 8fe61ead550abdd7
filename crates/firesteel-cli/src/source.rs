//! What a path on the command line is, and how to run it.

use crate::commands::worker::worker_command;
use crate::printer::Printer;
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::{Artifact, HeadRunner, Manifest};
use firesteel_checkpoint::{Checkpoint, GgufTokenizer, ModelConfig, preset, presets};
use firesteel_compile::{Compiled, CompiledManifest, StepEntry};
use firesteel_engine::{
    CheckpointEmbedding, CpuModel, Engine, EngineOptions, KvFormat, SequenceOptions,
};
use firesteel_generate::{AddedTokens, ChatTemplate, Conversation, GenerationConfig, Tokenizer};
use firesteel_ort::qnn::{HtpOptions, Limits};
use firesteel_ort::{Optimization, OrtModel, OrtOptions, OrtRunner};
use firesteel_step::{Decoder, Embedding, Logits, Runner, RunnerError, StepDecoder, StepSpec};
use firesteel_tensor::TensorView;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Who executes steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RunnerKind {
    /// The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights.
    Cpu,
    /// The reference engine in f64, from a checkpoint.
    Engine,
    /// The graph evaluator, from an artifact.
    Evaluator,
    /// ONNX Runtime on the CPU, from an artifact.
    Ort,
    /// The emulator of the HTP, from a compiled artifact.
    Htp,
}

/// Where ONNX Runtime is, and what a process of its own may use.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OrtArgs {
    /// ONNX Runtime library, or a folder that holds it; else FIRESTEEL_ORT, else what
    /// `firesteel setup ort` installed.
    #[arg(long, value_name = "PATH")]
    pub(crate) ort: Option<PathBuf>,
    /// Memory of the process that compiles or emulates the HTP, in MiB [default: nine tenths of
    /// what is free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit: Option<u64>,
    /// Time of that process, in seconds [default: 3600]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    time_limit: Option<u64>,
}

impl OrtArgs {
    /// Refuses what none of these runners has a use for.
    pub(crate) fn refuse_unused(&self, kinds: &[RunnerKind]) -> anyhow::Result<()> {
        use RunnerKind::{Htp, Ort};
        let given: [(&str, bool, &[RunnerKind]); 3] = [
            ("--ort", self.ort.is_some(), &[Ort, Htp]),
            ("--memory-limit", self.memory_limit.is_some(), &[Htp]),
            ("--time-limit", self.time_limit.is_some(), &[Htp]),
        ];
        for (option, _, users) in given.into_iter().filter(|(_, given, _)| *given) {
            if !kinds.iter().any(|kind| users.contains(kind)) {
                let users: Vec<&str> = users.iter().map(|kind| name(*kind)).collect();
                bail!(
                    "{option} does nothing, because nothing runs on {}; leave it out, or choose \
                     such a runner",
                    users.join(" or ")
                );
            }
        }
        Ok(())
    }

    /// The limits of a process that compiles or emulates.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            memory: self.memory_limit.map(|mebibytes| mebibytes << 20),
            time: Duration::from_secs(self.time_limit.unwrap_or(TIME_LIMIT)),
        }
    }
}

/// Seconds that a process may compile or emulate by default.
const TIME_LIMIT: u64 = 3600;

/// Who runs a sequence, and what it is to be able to besides one token a step.
pub(crate) struct DecoderOptions<'a> {
    /// Who executes the steps.
    pub(crate) kind: RunnerKind,
    /// Where ONNX Runtime is.
    pub(crate) ort: &'a OrtArgs,
    /// Tokens of a prompt that a runner takes at once.
    pub(crate) prompt: usize,
    /// Most tokens of which all logits are wanted at once; 0 or 1 for one.
    pub(crate) all_logits: usize,
    /// How the CPU's kernels store keys and values.
    pub(crate) kv: KvFormat,
}

/// A checkpoint, an artifact or a compiled one.
pub(crate) enum Source {
    Checkpoint(Arc<Checkpoint>),
    Artifact(Box<Artifact>),
    Compiled(Box<CompiledStep>),
}

/// A compiled artifact, and which of its steps is run.
pub(crate) struct CompiledStep {
    pub(crate) compiled: Compiled,
    pub(crate) step: String,
}

impl CompiledStep {
    /// The step's entry in the manifest.
    pub(crate) fn entry(&self) -> anyhow::Result<&StepEntry> {
        Ok(self.compiled.step(Some(&self.step))?)
    }
}

impl Source {
    /// Opens what `path` is and says its warnings.
    pub(crate) fn open(path: &Path, printer: &mut Printer) -> anyhow::Result<Self> {
        if CompiledManifest::is_in(path) {
            let compiled = Compiled::open(path)?;
            let step = compiled.step(None)?.name.clone();
            if !compiled.manifest().calibrated() {
                printer.warn("the compiled artifact is uncalibrated: its numbers are wrong");
            }
            return Ok(Self::Compiled(Box::new(CompiledStep { compiled, step })));
        }
        if Artifact::is_artifact(path) {
            let artifact = Artifact::open(path)?;
            if artifact.manifest().quantization.as_ref().is_some_and(|known| !known.calibrated) {
                printer.warn("the artifact is uncalibrated: its numbers are wrong");
            }
            return Ok(Self::Artifact(Box::new(artifact)));
        }
        let checkpoint = Checkpoint::open(path)?;
        for warning in checkpoint.warnings() {
            printer.warn(warning);
        }
        Ok(Self::Checkpoint(Arc::new(checkpoint)))
    }

    /// The manifest of an artifact, or of the step that was compiled.
    pub(crate) fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Checkpoint(_) => None,
            Self::Artifact(artifact) => Some(artifact.manifest()),
            Self::Compiled(step) => step.entry().ok().map(|entry| &entry.source),
        }
    }

    /// Compares the files of an artifact with their hashes.
    pub(crate) fn verify(&self) -> anyhow::Result<()> {
        match self {
            Self::Checkpoint(_) => Ok(()),
            Self::Artifact(artifact) => Ok(artifact.verify()?),
            Self::Compiled(step) => Ok(step.compiled.verify()?),
        }
    }

    /// The runner that this source has by itself: for a checkpoint the exact one, or the fast one.
    pub(crate) fn default_runner(&self, fast: bool) -> RunnerKind {
        match self {
            Self::Checkpoint(_) if fast => RunnerKind::Cpu,
            Self::Checkpoint(_) => RunnerKind::Engine,
            Self::Artifact(_) => RunnerKind::Evaluator,
            Self::Compiled(_) => RunnerKind::Htp,
        }
    }

    /// A runner of this source. A checkpoint runs steps of `spec`, an artifact those it was made
    /// for.
    pub(crate) fn runner(
        &self,
        kind: RunnerKind,
        spec: Option<&StepSpec>,
        layer_outputs: bool,
        ort: &OrtArgs,
    ) -> anyhow::Result<Box<dyn Runner>> {
        match (self, kind) {
            (Self::Checkpoint(checkpoint), RunnerKind::Engine | RunnerKind::Cpu) => {
                let Some(spec) = spec.cloned() else {
                    bail!("{} needs to know the step", name(kind));
                };
                let spec = if layer_outputs { spec.with_layer_outputs() } else { spec };
                if kind == RunnerKind::Cpu {
                    return Ok(Box::new(
                        CpuModel::new(Arc::clone(checkpoint), None)?.runner(spec)?,
                    ));
                }
                let engine = Engine::new(Arc::clone(checkpoint), EngineOptions::default());
                Ok(Box::new(engine.runner(spec)?))
            }
            (Self::Checkpoint(_), _) => bail!(
                "a checkpoint has no graph to run on {}; export it first, or use --runner engine",
                name(kind)
            ),
            (Self::Artifact(_), RunnerKind::Htp) => {
                bail!("the emulator of the HTP runs compiled artifacts; compile this one first")
            }
            (Self::Compiled(step), RunnerKind::Htp) => {
                let options = HtpOptions {
                    library: ort.ort.clone(),
                    worker: worker_command()?,
                    limits: ort.limits(),
                };
                Ok(step.compiled.emulator(step.entry()?, &options)?)
            }
            (Self::Compiled(_), _) => bail!(
                "a compiled artifact runs on the emulator of the HTP (--runner htp), not on {}",
                name(kind)
            ),
            (Self::Artifact(_), RunnerKind::Engine | RunnerKind::Cpu) => bail!(
                "cpu and engine run checkpoints, and this is an artifact; use --runner evaluator or \
                 --runner ort"
            ),
            (Self::Artifact(artifact), RunnerKind::Evaluator) => {
                Ok(artifact.evaluator(layer_outputs)?)
            }
            (Self::Artifact(artifact), RunnerKind::Ort) => {
                ort_runner(artifact, layer_outputs, Optimization::default(), ort)
            }
        }
    }

    /// A decoder of sequences as long as the context of `spec`, which takes one token a step. On the
    /// CPU's kernels it has caches of its own; other runners of a checkpoint get further steps, as
    /// `options` says, and an artifact has one step.
    pub(crate) fn decoder(
        &self,
        spec: &StepSpec,
        options: &DecoderOptions<'_>,
        printer: &mut Printer,
    ) -> anyhow::Result<Box<dyn Decoder>> {
        if let (Self::Checkpoint(checkpoint), RunnerKind::Cpu) = (self, options.kind) {
            let model = CpuModel::new(Arc::clone(checkpoint), None)?;
            for warning in model.warnings() {
                printer.warn(warning);
            }
            let options = SequenceOptions { context: spec.context, kv: options.kv };
            return Ok(Box::new(model.sequence(options)?));
        }
        let Some(embedding) = self.embedding()? else {
            bail!("the artifact has no embedding table; export with --embedding");
        };
        let runner = |spec: &StepSpec| self.runner(options.kind, Some(spec), false, options.ort);
        let mut decoder = StepDecoder::new(&self.config()?, runner(spec)?, embedding)?;
        if !matches!(self, Self::Checkpoint(_)) {
            return Ok(Box::new(decoder));
        }
        let prompt = options.prompt.min(spec.context);
        if prompt > 1 {
            decoder = decoder.with_runner(runner(&spec.with_tokens(prompt)?)?)?;
        }
        let all = spec.with_logits(Logits::All)?;
        let mut tokens = options.all_logits.min(spec.context);
        while tokens > 1 {
            decoder = decoder.with_runner(runner(&all.with_tokens(tokens)?)?)?;
            // Shorter proposals run in shorter steps.
            tokens = tokens.div_ceil(2).min(tokens - 1);
        }
        Ok(Box::new(decoder))
    }

    /// The embedding table, if this source has one.
    pub(crate) fn embedding(&self) -> anyhow::Result<Option<Box<dyn Embedding>>> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => {
                Some(Box::new(CheckpointEmbedding::new(Arc::clone(checkpoint))))
            }
            Self::Artifact(artifact) => artifact.embedding()?.map(|table| Box::new(table) as _),
            Self::Compiled(step) => step.compiled.embedding()?.map(|table| Box::new(table) as _),
        })
    }

    /// The tokenizer of the folder or the GGUF file, if it has one.
    pub(crate) fn tokenizer(&self) -> anyhow::Result<Option<Tokenizer>> {
        if let (Self::Checkpoint(checkpoint), Some(tokenizer)) = (self, self.gguf_tokenizer()?)
            && let Some(gguf) = checkpoint.gguf()
        {
            let config = GenerationConfig::from_gguf(gguf)?;
            let tokenizer = Tokenizer::from_gguf(&tokenizer, gguf.path())?;
            return Ok(Some(tokenizer.with_generation_config(config)));
        }
        match self.path() {
            Some(folder) if folder.join("tokenizer.json").is_file() => {
                Ok(Some(Tokenizer::open(folder)?))
            }
            _ => Ok(None),
        }
    }

    /// The chat template of the folder or the GGUF file.
    pub(crate) fn chat_template(&self) -> anyhow::Result<ChatTemplate> {
        let Some(path) = self.path() else {
            bail!("weights that are not on disk have no template")
        };
        Ok(match self.gguf_tokenizer()? {
            Some(gguf) => ChatTemplate::from_gguf(&gguf, path)?,
            None => ChatTemplate::open(path)?,
        })
    }

    fn gguf_tokenizer(&self) -> anyhow::Result<Option<GgufTokenizer>> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.gguf_tokenizer()?,
            Self::Artifact(_) | Self::Compiled(_) => None,
        })
    }

    /// Where it is; `None` for weights that are not on disk.
    fn path(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.path(),
            Self::Artifact(artifact) => Some(artifact.folder()),
            Self::Compiled(step) => Some(step.compiled.folder()),
        }
    }

    /// The model's config: that of the checkpoint, or the copy in the artifact.
    pub(crate) fn config(&self) -> anyhow::Result<ModelConfig> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.config().clone(),
            Self::Artifact(artifact) => ModelConfig::open(artifact.folder())?.0,
            Self::Compiled(step) => ModelConfig::open(step.compiled.folder())?.0,
        })
    }
}

/// A model's shape, and its weights where there are some.
pub(crate) struct ModelSource {
    pub(crate) config: ModelConfig,
    /// `None` for a config alone.
    pub(crate) checkpoint: Option<Checkpoint>,
    pub(crate) warnings: Vec<String>,
}

impl ModelSource {
    /// A checkpoint folder, a GGUF file or a config.json.
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let gguf = path.extension().is_some_and(|extension| extension == "gguf");
        if gguf || path.is_dir() {
            let checkpoint = Checkpoint::open(path)?;
            let warnings = checkpoint.warnings().to_vec();
            return Ok(Self {
                config: checkpoint.config().clone(),
                checkpoint: Some(checkpoint),
                warnings,
            });
        }
        let (config, warnings) = ModelConfig::open(path)?;
        Ok(Self { config, checkpoint: None, warnings })
    }

    /// The name of a published shape, or a path.
    pub(crate) fn named(name: &str) -> anyhow::Result<Self> {
        if let Some(config) = preset(name) {
            return Ok(Self { config, checkpoint: None, warnings: Vec::new() });
        }
        let path = Path::new(name);
        if !path.exists() {
            let known = presets().join(", ");
            bail!("--model {name} is neither a file or folder nor a known shape ({known})");
        }
        Self::open(path)
    }
}

/// Longest text that is read from a file.
pub(crate) const TEXT_LIMIT: u64 = 16 << 20;

/// A text file of the user's, bounded.
pub(crate) fn read_text(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let file = fs_err::File::open(path)?;
    let read = file.take(TEXT_LIMIT + 1).read_to_string(&mut text);
    let read = read.with_context(|| format!("{} cannot be read as text", path.display()))?;
    if read as u64 > TEXT_LIMIT {
        bail!("{} is longer than {TEXT_LIMIT} bytes", path.display());
    }
    Ok(text)
}

/// Whether a file of texts is one of conversations.
pub(crate) fn has_chats(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "jsonl")
}

/// The conversations of a file with one on each line.
pub(crate) fn read_chats(path: &Path) -> anyhow::Result<Vec<Conversation>> {
    let text = read_text(path)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(number, line)| {
            serde_json::from_str(line).with_context(|| {
                format!("line {} of {} is no conversation", number + 1, path.display())
            })
        })
        .collect()
}

/// The chat template of the first of `sources` that has one.
pub(crate) fn chat_template(sources: &[&Source]) -> anyhow::Result<ChatTemplate> {
    let mut found = sources.iter().map(|source| source.chat_template());
    let first = found.next().context("there is no model for a template")?;
    first.or_else(|error| found.find_map(Result::ok).ok_or(error))
}

/// The ids of each conversation of `file` with its answers, in the template of `sources`.
pub(crate) fn chat_ids(
    file: &Path,
    sources: &[&Source],
    tokenizer: &Tokenizer,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let template = chat_template(sources)?;
    let chats = read_chats(file)?;
    let encoded = (1..).zip(&chats).map(|(number, chat)| {
        template.encode(chat, tokenizer).with_context(|| numbered(number, file))
    });
    encoded.collect()
}

/// The ids of a text, or those of each conversation where the file ends in .jsonl.
pub(crate) fn text_ids(
    file: &Path,
    sources: &[&Source],
    tokenizer: &Tokenizer,
    added: AddedTokens,
) -> anyhow::Result<Vec<Vec<u32>>> {
    match has_chats(file) {
        true => chat_ids(file, sources, tokenizer),
        false => Ok(vec![tokenizer.encode(&read_text(file)?, added)?]),
    }
}

/// What a conversation of `file` is called in errors.
pub(crate) fn numbered(number: usize, file: &Path) -> String {
    format!("conversation {number} of {}", file.display())
}

/// What `option` says of keys and values, which only the CPU's kernels store in a format of their
/// own.
pub(crate) fn kv_format(
    option: &str,
    given: Option<KvFormat>,
    kind: RunnerKind,
) -> anyhow::Result<Option<KvFormat>> {
    if let Some(format) = given.filter(|_| kind != RunnerKind::Cpu) {
        bail!(
            "{option} {} does nothing on {}, whose caches are those of the step; leave it out, or \
             run a checkpoint on the cpu runner",
            format.name(),
            name(kind)
        );
    }
    Ok(given)
}

fn name(kind: RunnerKind) -> &'static str {
    match kind {
        RunnerKind::Cpu => "the CPU's kernels",
        RunnerKind::Engine => "the engine",
        RunnerKind::Evaluator => "the evaluator",
        RunnerKind::Ort => "ONNX Runtime",
        RunnerKind::Htp => "the emulator of the HTP",
    }
}

/// The artifact on ONNX Runtime. What is checked runs without optimizations, the default.
pub(crate) fn ort_runner(
    artifact: &Artifact,
    layer_outputs: bool,
    optimization: Optimization,
    ort: &OrtArgs,
) -> anyhow::Result<Box<dyn Runner>> {
    let options = OrtOptions { library: ort.ort.clone(), optimization, ..OrtOptions::default() };
    let manifest = artifact.manifest();
    let Some((first, parts)) = manifest.graphs.split_first() else {
        bail!("the manifest names no graph");
    };
    let path = artifact.graph_path(first);
    let spec = artifact.graph_spec(layer_outputs);
    let step: Box<dyn Runner> = if layer_outputs {
        // The layers' values are outputs of a copy in memory; the file stays what it is.
        let names: Vec<&str> = first.layer_hidden.iter().map(String::as_str).collect();
        let bytes = firesteel_onnx::model_with_outputs(&path, &names)?;
        Box::new(OrtRunner::from_bytes(&bytes, artifact.folder(), spec, &options)?)
    } else {
        Box::new(OrtRunner::open(&path, spec, &options)?)
    };
    let mut heads: Vec<HeadRunner> = Vec::new();
    for part in parts {
        let mut model = OrtModel::open(&artifact.graph_path(part), &options)?;
        heads.push(Box::new(move |hidden: TensorView<'_>| {
            let fail = |message: String| RunnerError::Failed { runner: "ort".into(), message };
            let outputs =
                model.run(&[("hidden", hidden)]).map_err(|error| fail(error.to_string()))?;
            outputs.into_iter().next().ok_or_else(|| fail("a head graph has no output".into()))
        }));
    }
    Ok(artifact.join(step, heads)?)
}
