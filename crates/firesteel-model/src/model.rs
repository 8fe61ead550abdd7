use crate::{
    DecoderOptions, ModelError, PathKind, RunnerKind, RunnerOptions, SequenceDecoder, ort_runner,
};
use firesteel_artifact::{Artifact, Manifest};
use firesteel_checkpoint::{Checkpoint, GgufTokenizer, ModelConfig, file_in};
use firesteel_compile::{Compiled, StepEntry};
use firesteel_engine::{
    CheckpointEmbedding, CpuModel, Engine, EngineOptions, KvFormat, SequenceOptions,
};
use firesteel_generate::{ChatTemplate, GenerationConfig, Generator, Tokenizer};
use firesteel_ort::Optimization;
use firesteel_ort::qnn::HtpOptions;
use firesteel_step::{Embedding, Logits, Runner, StepDecoder, StepOptions, StepSpec};
use std::path::Path;
use std::sync::Arc;

/// A checkpoint, an artifact or a compiled one.
#[derive(Debug)]
pub enum Model {
    /// A Hugging Face folder or a GGUF file.
    Checkpoint(Arc<Checkpoint>),
    /// The graphs of a step.
    Artifact(Box<Artifact>),
    /// What was compiled of such graphs.
    Compiled(Box<CompiledStep>),
}

/// A compiled artifact, and which of its steps is run.
#[derive(Debug)]
pub struct CompiledStep {
    /// All of it.
    pub compiled: Compiled,
    /// Name of the step.
    pub step: String,
}

impl CompiledStep {
    /// The step's entry in the manifest.
    ///
    /// # Errors
    /// When there is no step of this name.
    pub fn entry(&self) -> Result<&StepEntry, ModelError> {
        Ok(self.compiled.step(Some(&self.step))?)
    }
}

/// Prompt tokens that a runner of a checkpoint takes at once.
const PROMPT_CHUNK: usize = 64;

impl Model {
    /// Opens what `path` is. Weights are mapped and not read.
    ///
    /// # Errors
    /// When nothing is there, or what is there is not understood; the message says what is accepted.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        match PathKind::of(path)? {
            PathKind::Compiled => {
                let compiled = Compiled::open(path)?;
                let step = compiled.step(None)?.name.clone();
                Ok(Self::Compiled(Box::new(CompiledStep { compiled, step })))
            }
            PathKind::Artifact => Ok(Self::Artifact(Box::new(Artifact::open(path)?))),
            PathKind::Checkpoint | PathKind::Gguf => {
                Ok(Self::Checkpoint(Arc::new(Checkpoint::open(path)?)))
            }
            PathKind::Config => Err(ModelError::Path {
                path: path.into(),
                reason: "a config has no weights; accepted: the folder that holds config.json, a \
                         GGUF file, or a folder that firesteel wrote"
                    .into(),
            }),
        }
    }

    /// What is odd about it, to be told to whoever uses it.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.warnings().to_vec(),
            Self::Artifact(artifact) => {
                let known = artifact.manifest().quantization.as_ref();
                let wrong = "the artifact is uncalibrated: its numbers are wrong";
                known.filter(|known| !known.calibrated).map(|_| wrong.into()).into_iter().collect()
            }
            Self::Compiled(step) if !step.compiled.manifest().calibrated() => {
                vec!["the compiled artifact is uncalibrated: its numbers are wrong".into()]
            }
            Self::Compiled(_) => Vec::new(),
        }
    }

    /// The manifest of an artifact, or of the step that was compiled.
    pub fn manifest(&self) -> Option<&Manifest> {
        match self {
            Self::Checkpoint(_) => None,
            Self::Artifact(artifact) => Some(artifact.manifest()),
            Self::Compiled(step) => step.entry().ok().map(|entry| &entry.source),
        }
    }

    /// Compares the files of an artifact with their hashes.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn verify(&self) -> Result<(), ModelError> {
        match self {
            Self::Checkpoint(_) => Ok(()),
            Self::Artifact(artifact) => Ok(artifact.verify()?),
            Self::Compiled(step) => Ok(step.compiled.verify()?),
        }
    }

    /// The runner that it has by itself: for a checkpoint the exact one, or the fast one.
    pub fn default_runner(&self, fast: bool) -> RunnerKind {
        match self {
            Self::Checkpoint(_) if fast => RunnerKind::Cpu,
            Self::Checkpoint(_) => RunnerKind::Engine,
            Self::Artifact(_) => RunnerKind::Evaluator,
            Self::Compiled(_) => RunnerKind::Htp,
        }
    }

    /// A runner of it. A checkpoint runs steps of `spec`, an artifact those it was made for.
    ///
    /// # Errors
    /// When it does not run on `kind`, or the runner refuses.
    pub fn runner(
        &self,
        kind: RunnerKind,
        spec: Option<&StepSpec>,
        layer_outputs: bool,
        options: &RunnerOptions,
    ) -> Result<Box<dyn Runner>, ModelError> {
        let refuse = |problem: String| Err(ModelError::Runner { problem });
        match (self, kind) {
            (Self::Checkpoint(checkpoint), RunnerKind::Engine | RunnerKind::Cpu) => {
                let Some(spec) = spec.cloned() else {
                    return refuse(format!("{kind} needs to know the step"));
                };
                let spec = if layer_outputs { spec.with_layer_outputs() } else { spec };
                if kind == RunnerKind::Cpu {
                    let model = CpuModel::new(Arc::clone(checkpoint), None)?;
                    return Ok(Box::new(model.runner(spec)?));
                }
                let engine = Engine::new(Arc::clone(checkpoint), EngineOptions::default());
                Ok(Box::new(engine.runner(spec)?))
            }
            (Self::Checkpoint(_), _) => refuse(format!(
                "a checkpoint has no graph to run on {kind}; export it first, or use --runner engine"
            )),
            (Self::Artifact(_), RunnerKind::Htp) => refuse(
                "the emulator of the HTP runs compiled artifacts; compile this one first".into(),
            ),
            (Self::Compiled(step), RunnerKind::Htp) => {
                let Some(worker) = options.worker.clone() else {
                    return refuse("the emulator of the HTP needs a program to work in".into());
                };
                let library = options.library.clone();
                let options = HtpOptions { library, worker, limits: options.limits };
                Ok(step.compiled.emulator(step.entry()?, &options)?)
            }
            (Self::Compiled(_), _) => refuse(format!(
                "a compiled artifact runs on the emulator of the HTP (--runner htp), not on {kind}"
            )),
            (Self::Artifact(_), RunnerKind::Engine | RunnerKind::Cpu) => refuse(
                "cpu and engine run checkpoints, and this is an artifact; use --runner evaluator or \
                 --runner ort"
                    .into(),
            ),
            (Self::Artifact(artifact), RunnerKind::Evaluator) => {
                Ok(artifact.evaluator(layer_outputs)?)
            }
            (Self::Artifact(artifact), RunnerKind::Ort) => {
                ort_runner(artifact, layer_outputs, Optimization::default(), options)
            }
        }
    }

    /// A decoder of sequences as long as the context of `spec`, which takes one token a step. On the
    /// CPU's kernels it has caches of its own; other runners of a checkpoint get further steps, as
    /// `options` says, and an artifact has one step.
    ///
    /// # Errors
    /// As [`Model::runner`], and when there is no embedding table.
    pub fn decoder(
        &self,
        spec: &StepSpec,
        options: &DecoderOptions<'_>,
    ) -> Result<SequenceDecoder, ModelError> {
        if let (Self::Checkpoint(checkpoint), RunnerKind::Cpu) = (self, options.kind) {
            let model = CpuModel::new(Arc::clone(checkpoint), None)?;
            let warnings = model.warnings().to_vec();
            let sequence = SequenceOptions { context: spec.context, kv: options.kv };
            return Ok(SequenceDecoder { decoder: Box::new(model.sequence(sequence)?), warnings });
        }
        let Some(embedding) = self.embedding()? else {
            let problem = "the artifact has no embedding table; export with --embedding";
            return Err(ModelError::Runner { problem: problem.into() });
        };
        let runner = |spec: &StepSpec| self.runner(options.kind, Some(spec), false, options.runner);
        let mut decoder = StepDecoder::new(&self.config()?, runner(spec)?, embedding)?;
        if matches!(self, Self::Checkpoint(_)) {
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
        }
        Ok(SequenceDecoder { decoder: Box::new(decoder), warnings: Vec::new() })
    }

    /// A generator on the runner that the model has by itself, the fast one for a checkpoint. A
    /// checkpoint gets a context of `context` tokens, at most what the model claims; an artifact has
    /// its own.
    ///
    /// # Errors
    /// As [`Model::decoder`], and when the artifact's step is no decode step with a head.
    pub fn generator<'t>(
        &self,
        tokenizer: &'t Tokenizer,
        context: usize,
        options: &RunnerOptions,
    ) -> Result<Generator<'t>, ModelError> {
        let config = self.config()?;
        let options = DecoderOptions {
            kind: self.default_runner(true),
            runner: options,
            prompt: PROMPT_CHUNK,
            all_logits: 0,
            kv: KvFormat::default(),
        };
        let context = context.min(config.max_position_embeddings);
        let decoder = self.decoder(&self.decode_step(context)?, &options)?.decoder;
        Ok(Generator::new(&config, decoder)?.with_tokenizer(tokenizer))
    }

    /// The step of an artifact, which must take one token and have a head, or that of a checkpoint
    /// with a context of `context`.
    ///
    /// # Errors
    /// When the artifact's step is another, or the context is impossible.
    pub fn decode_step(&self, context: usize) -> Result<StepSpec, ModelError> {
        let spec = match self.manifest() {
            Some(manifest) => manifest.contract()?,
            None => {
                let config = self.config()?;
                StepSpec::new(&config, &StepOptions::decode(&config, context))?
            }
        };
        let refuse = |problem: String| Err(ModelError::Runner { problem });
        if spec.tokens != 1 {
            return refuse(format!(
                "the artifact takes {} tokens a step; one for decoding has --tokens 1",
                spec.tokens
            ));
        }
        if spec.logits == Logits::Hidden {
            let problem = "the artifact has no vocabulary projection; export without --no-lm-head";
            return refuse(problem.into());
        }
        Ok(spec)
    }

    /// The embedding table, if there is one.
    ///
    /// # Errors
    /// When an artifact's table cannot be read.
    pub fn embedding(&self) -> Result<Option<Box<dyn Embedding>>, ModelError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => {
                Some(Box::new(CheckpointEmbedding::new(Arc::clone(checkpoint))))
            }
            Self::Artifact(artifact) => artifact.embedding()?.map(|table| Box::new(table) as _),
            Self::Compiled(step) => step.compiled.embedding()?.map(|table| Box::new(table) as _),
        })
    }

    /// The tokenizer of the folder or the GGUF file, if it has one.
    ///
    /// # Errors
    /// When it is not understood.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, ModelError> {
        if let (Self::Checkpoint(checkpoint), Some(tokenizer)) = (self, self.gguf_tokenizer()?)
            && let Some(gguf) = checkpoint.gguf()
        {
            let config = GenerationConfig::from_gguf(gguf)?;
            let tokenizer = Tokenizer::from_gguf(&tokenizer, gguf.path())?;
            return Ok(Some(tokenizer.with_generation_config(config)));
        }
        match self.path() {
            Some(folder) if folder.is_dir() && file_in(folder, "tokenizer.json")?.is_some() => {
                Ok(Some(Tokenizer::open(folder)?))
            }
            _ => Ok(None),
        }
    }

    /// The chat template of the folder or the GGUF file.
    ///
    /// # Errors
    /// When there is none or it is not understood.
    pub fn chat_template(&self) -> Result<ChatTemplate, ModelError> {
        let Some(path) = self.path() else {
            let problem = "weights that are not on disk have no template";
            return Err(ModelError::Runner { problem: problem.into() });
        };
        Ok(match self.gguf_tokenizer()? {
            Some(gguf) => ChatTemplate::from_gguf(&gguf, path)?,
            None => ChatTemplate::open(path)?,
        })
    }

    fn gguf_tokenizer(&self) -> Result<Option<GgufTokenizer>, ModelError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.gguf_tokenizer()?,
            Self::Artifact(_) | Self::Compiled(_) => None,
        })
    }

    /// Where it is; `None` for weights that are not on disk.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.path(),
            Self::Artifact(artifact) => Some(artifact.folder()),
            Self::Compiled(step) => Some(step.compiled.folder()),
        }
    }

    /// The model's config: that of the checkpoint, or the copy in the artifact.
    ///
    /// # Errors
    /// When the copy is not understood.
    pub fn config(&self) -> Result<ModelConfig, ModelError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.config().clone(),
            Self::Artifact(artifact) => ModelConfig::open(artifact.folder())?.0,
            Self::Compiled(step) => ModelConfig::open(step.compiled.folder())?.0,
        })
    }
}
