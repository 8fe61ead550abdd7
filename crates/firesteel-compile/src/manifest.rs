use crate::CompileError;
use firesteel_artifact::{EmbeddingEntry, JsonFormat, MANIFEST, Manifest};
use firesteel_check::audit::{Audit, Rule};
use firesteel_ort::qnn::{Performance, Soc, compile_settings};
use firesteel_ort::{QNN_SDK_VERSION, QNN_VERSION, find_library, library_version};
use firesteel_step::{PortEncoding, StepSpec};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Version of the manifest's layout that is written and read.
pub const COMPILED_VERSION: u32 = 3;

/// How it is read.
const DOCUMENT: JsonFormat = JsonFormat {
    format: "firesteel-compiled",
    version: COMPILED_VERSION,
    limit: 256 << 20,
    what: "the manifest of a compiled firesteel artifact",
    again: "compile the artifact again",
};

/// What a compiled artifact is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompiledManifest {
    /// Always `firesteel-compiled`.
    pub format: String,
    /// [`COMPILED_VERSION`].
    pub format_version: u32,
    /// Version of the program that wrote it.
    pub tool_version: String,
    /// The chip.
    pub target: Target,
    /// The versions that made it.
    pub libraries: Libraries,
    /// What the provider was told, by its own names of options.
    pub settings: BTreeMap<String, String>,
    /// Rules whose violations were allowed.
    pub allowed: Vec<Rule>,
    /// The steps.
    pub steps: Vec<StepEntry>,
    /// The binary that several steps share; `None` when each has its own only.
    pub shared: Option<SharedEntry>,
    /// All files but the manifest.
    pub files: Vec<FileEntry>,
}

/// What was compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Name of the chip.
    pub soc: String,
    /// Its number.
    pub soc_number: u32,
    /// Its architecture.
    pub arch: u32,
    /// What a host is to ask of the device, when it opens a session. The compiler is not told.
    pub performance: Performance,
}

impl Target {
    /// The target of a chip.
    pub fn new(soc: Soc, performance: Performance) -> Self {
        Self { soc: soc.name.to_owned(), soc_number: soc.number, arch: soc.arch, performance }
    }
}

/// The versions that make and read a context binary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Libraries {
    /// ONNX Runtime.
    pub onnxruntime: String,
    /// Its QNN plugin.
    pub onnxruntime_qnn: String,
    /// Qualcomm's SDK.
    pub qnn_sdk: String,
}

impl Libraries {
    /// The versions that compile and emulate here: those of the ONNX Runtime at `library`, or of
    /// the one that is found without, and of the plugin, of which only one version is used.
    ///
    /// # Errors
    /// When there is no ONNX Runtime.
    pub fn of(library: Option<&Path>) -> Result<Self, CompileError> {
        let version = library_version(&find_library(library)?);
        Ok(Self {
            onnxruntime: version.unwrap_or_else(|| "of an unknown version".to_owned()),
            onnxruntime_qnn: QNN_VERSION.to_owned(),
            qnn_sdk: QNN_SDK_VERSION.to_owned(),
        })
    }

    /// What differs from `other`, a clause each.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        [
            ("ONNX Runtime", &self.onnxruntime, &other.onnxruntime),
            ("the QNN plugin", &self.onnxruntime_qnn, &other.onnxruntime_qnn),
            ("the QNN SDK", &self.qnn_sdk, &other.qnn_sdk),
        ]
        .into_iter()
        .filter(|(_, own, other)| own != other)
        .map(|(name, own, other)| format!("{name} was {own} and is {other}"))
        .collect()
    }
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepEntry {
    /// `decode`, or `prefill-` and the number of tokens.
    pub name: String,
    /// The artifact that was compiled.
    pub source: Manifest,
    /// Its parts, in the order in which they run: each but the first takes the hidden state of the
    /// one before, those of the head all that of the last layers.
    pub parts: Vec<PartEntry>,
    /// How far it is from the model in floats, where that was measured and recorded.
    pub measured: Option<Measured>,
}

/// A comparison of a step on the emulator with a reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Name of the reference runner.
    pub reference: String,
    /// Tokens that both were given.
    pub tokens: usize,
    /// SNR of the first output (logits or hidden state) in dB; `None` when it is identical.
    pub output_db: Option<f64>,
    /// SNR of new keys and values in dB; `None` when they are identical.
    pub entries_db: Option<f64>,
    /// Share of tokens with the same best next token, ties left out; `None` without a head.
    pub top1: Option<f64>,
    /// Mean KL divergence in nats; `None` without a head.
    pub kl_mean: Option<f64>,
    /// Tokens of the greedy continuation that agree, and how many were compared.
    pub greedy: Option<(usize, usize)>,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decibels = |db: Option<f64>| db.map_or("identical".into(), |db| format!("{db:.1} dB"));
        write!(
            f,
            "{} tokens against {}: output {}, keys and values {}",
            self.tokens,
            self.reference,
            decibels(self.output_db),
            decibels(self.entries_db)
        )?;
        if let Some(top1) = self.top1 {
            write!(f, ", top-1 {:.1} %", 100.0 * top1)?;
        }
        if let Some(kl) = self.kl_mean {
            write!(f, ", KL {kl:.2e}")?;
        }
        if let Some((agreed, count)) = self.greedy {
            write!(f, ", greedy {agreed} of {count}")?;
        }
        Ok(())
    }
}

/// What a part does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PartRole {
    /// A slice of the step with the same contract: `x` or the hidden state in; logits, or the
    /// hidden state, and its own cache entries out.
    Layers {
        /// The contract of the slice.
        step: Box<StepSpec>,
    },
    /// A part of the vocabulary projection: the hidden state in, logits of these rows out.
    Head {
        /// Vocabulary rows.
        rows: Range<usize>,
    },
}

/// One part, a context of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartEntry {
    /// Name.
    pub name: String,
    /// What it does.
    pub role: PartRole,
    /// Encodings of its inputs and outputs that are integers.
    pub ports: Vec<PortEncoding>,
    /// The context file, an ONNX model that names the binary.
    pub context: String,
    /// The binary.
    pub binary: String,
    /// Names of the graphs in the binary.
    pub graphs: Vec<String>,
    /// Bytes of the constants of the graph.
    pub constant_bytes: u64,
    /// Bytes of the binary.
    pub binary_bytes: u64,
    /// What the compiler made of it.
    pub audit: Audit,
}

/// A binary that several steps share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedEntry {
    /// Name of the step and its context file.
    pub contexts: Vec<(String, String)>,
    /// The binary.
    pub binary: String,
    /// Its bytes.
    pub bytes: u64,
}

/// A file's identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Bare name.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// XXH3-128 of the content, in hexadecimal: finds damage, proves no origin.
    pub xxh3: String,
}

impl CompiledManifest {
    pub(crate) fn new(target: Target, libraries: Libraries, allowed: Vec<Rule>) -> Self {
        Self {
            format: DOCUMENT.format.into(),
            format_version: COMPILED_VERSION,
            tool_version: env!("CARGO_PKG_VERSION").into(),
            settings: compile_settings(target.soc_number, target.arch)
                .map(|(key, value)| (key.to_owned(), value))
                .into(),
            target,
            libraries,
            allowed,
            steps: Vec::new(),
            shared: None,
            files: Vec::new(),
        }
    }

    /// Whether `folder` has the manifest of a compiled artifact, of any version.
    pub fn is_in(folder: &Path) -> bool {
        DOCUMENT.is(&folder.join(MANIFEST))
    }

    /// Whether the ranges of all its activations come from a calibration, or it has floats.
    pub fn calibrated(&self) -> bool {
        let mut known = self.steps.iter().filter_map(|step| step.source.quantization.as_ref());
        known.all(|known| known.calibrated)
    }

    /// Whether `folder` is a compiled artifact and nothing else, so that nothing is lost with it.
    ///
    /// # Errors
    /// A clause that says what it is or holds besides.
    pub fn owns(folder: &Path) -> Result<(), String> {
        let manifest =
            Self::read(folder).map_err(|_| "is no compiled firesteel artifact".to_owned())?;
        let entries = fs::read_dir(folder).map_err(|error| format!("cannot be read: {error}"))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("cannot be read: {error}"))?;
            let name = entry.file_name();
            let ours = name.to_str().is_some_and(|name| {
                name == MANIFEST || manifest.files.iter().any(|file| file.name == name)
            });
            if !ours {
                let name = name.to_string_lossy().into_owned();
                return Err(format!("holds {name:?}, which is no part of the artifact"));
            }
        }
        Ok(())
    }

    /// Reads and checks the manifest of a folder.
    ///
    /// # Errors
    /// When it is missing, too large, not of this format and version, or contradicts itself.
    pub fn read(folder: &Path) -> Result<Self, CompileError> {
        let file = folder.join(MANIFEST);
        let problem = |problem: String| CompileError::Manifest { file: file.clone(), problem };
        let manifest: Self = DOCUMENT.read(&file)?;
        manifest.validate().map_err(problem)?;
        Ok(manifest)
    }

    /// Proves that names are bare, that every file that is named is listed, and that the parts of
    /// each step make up its contract.
    fn validate(&self) -> Result<(), String> {
        for file in &self.files {
            if Path::new(&file.name).file_name().is_none_or(|plain| plain != file.name.as_str()) {
                return Err(format!("{:?} is not a bare file name", file.name));
            }
        }
        let listed = |name: &String| {
            let found = self.files.iter().any(|file| file.name == *name);
            if found { Ok(()) } else { Err(format!("{name:?} is not among the files")) }
        };
        let Some(first) = self.steps.first() else { return Err("names no step".into()) };
        if let Some(EmbeddingEntry::File { file, .. }) = &first.source.embedding {
            listed(file)?;
        }
        for step in &self.steps {
            step.source.step.validate().map_err(|error| format!("{}: {error}", step.name))?;
            for part in &step.parts {
                listed(&part.context)?;
                listed(&part.binary)?;
                if let PartRole::Layers { step: slice } = &part.role {
                    slice.validate().map_err(|error| format!("{}: {error}", part.name))?;
                }
            }
            step.validate()?;
        }
        if let Some(shared) = &self.shared {
            listed(&shared.binary)?;
            shared.contexts.iter().try_for_each(|(_, context)| listed(context))?;
        }
        Ok(())
    }
}

impl StepEntry {
    /// The slices of layers, in order.
    pub(crate) fn slices(&self) -> impl Iterator<Item = (&PartEntry, &StepSpec)> {
        self.parts.iter().filter_map(|part| match &part.role {
            PartRole::Layers { step } => Some((part, &**step)),
            PartRole::Head { .. } => None,
        })
    }

    /// The parts of the head, in order of their rows.
    pub(crate) fn heads(&self) -> impl Iterator<Item = &PartEntry> {
        self.parts.iter().filter(|part| matches!(part.role, PartRole::Head { .. }))
    }

    fn validate(&self) -> Result<(), String> {
        let whole = &self.source.step;
        let mut layer = 0;
        for (part, slice) in self.slices() {
            let range = whole.layers.get(layer..layer + slice.layers.len());
            if slice.first_layer != whole.first_layer + layer || range != Some(&slice.layers[..]) {
                return Err(format!("{}: its layers do not follow those before", part.name));
            }
            layer += slice.layers.len();
        }
        if layer != whole.layers.len() {
            return Err(format!("{}: {layer} of {} layers", self.name, whole.layers.len()));
        }
        let mut row = 0;
        for part in self.heads() {
            if let PartRole::Head { rows } = &part.role {
                if rows.start != row || rows.end <= row {
                    return Err(format!("{}: rows are missing or repeated", part.name));
                }
                row = rows.end;
            }
        }
        if row != 0 && row != whole.vocab_size {
            return Err(format!("{}: the head has {row} rows", self.name));
        }
        Ok(())
    }
}
