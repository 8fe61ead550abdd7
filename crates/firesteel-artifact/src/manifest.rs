use crate::{ArtifactError, JsonFormat};
use firesteel_checkpoint::LayerKind;
use firesteel_export::{ExportOptions, WideTensors};
use firesteel_graph::{Graph, Tag};
use firesteel_step::{Logits, PortEncoding, StepSpec};
use firesteel_tensor::DType;
use fs_err as fs;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

/// Name of the manifest in the folder.
pub const MANIFEST: &str = "manifest.json";

/// Version of the manifest's layout that is written and read.
pub const FORMAT_VERSION: u32 = 2;

/// How it is read.
const DOCUMENT: JsonFormat = JsonFormat {
    format: "firesteel-artifact",
    version: FORMAT_VERSION,
    limit: 64 << 20,
    what: "the manifest of a firesteel artifact",
    again: "export the artifact again",
};

/// What an artifact is. Everything in it follows from the checkpoint and the options, so equal
/// exports have equal manifests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `firesteel-artifact`.
    pub format: String,
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of the program that wrote it.
    pub tool_version: String,
    /// The model.
    pub model: ModelEntry,
    /// Options of the export.
    pub options: ExportOptions,
    /// ONNX opset of every graph.
    pub opset: i64,
    /// Contract of the step's own graph. With a sharded head its first output is the hidden
    /// state, and [`Manifest::contract`] is what the graphs do together.
    pub step: StepSpec,
    /// Kind of each layer of the slice.
    pub layer_types: Vec<LayerKind>,
    /// Where the vocabulary projection comes from; `None` without one.
    pub head: Option<HeadSource>,
    /// Inputs of the full contract that this slice has no use for.
    pub unused_inputs: Vec<String>,
    /// Which tensors are kept wider than the rest, and why.
    pub wide: WideTensors,
    /// Memory of the KV cache.
    pub kv_bytes: KvBytesEntry,
    /// The graphs, the step first, then the parts of the head.
    pub graphs: Vec<GraphEntry>,
    /// Files with the weights.
    pub data: Vec<DataEntry>,
    /// Where a host finds the embedding table; `None` when the artifact holds none.
    pub embedding: Option<EmbeddingEntry>,
    /// Other files, most of them copied from the checkpoint.
    pub copied: Vec<FileHash>,
    /// How the graphs are quantized; `None` for graphs in floats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
}

/// How the graphs of an artifact are quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Quantization {
    /// Name of the scheme, such as `w8a16`.
    pub scheme: String,
    /// Number format of keys and values.
    pub kv: String,
    /// Whether the ranges of activations come from a calibration. Without, the numbers are good for
    /// measuring time only.
    pub calibrated: bool,
    /// The texts of the calibration; none when it ran ids that came from nowhere.
    #[serde(default)]
    pub calibration_texts: Vec<String>,
    /// SHA-256 of the ranges.
    pub ranges_sha256: Option<String>,
    /// Inputs and outputs of the step's graph that are integers. The contract has floats for them;
    /// whoever runs the graph converts, or writes cache entries raw.
    pub ports: Vec<PortEncoding>,
    /// The matrices.
    pub weights: Vec<QuantizedWeight>,
    /// Bits for each weight of the matrices, the head and the scales of rows included.
    pub bits_per_weight: f64,
}

/// A matrix of a quantized graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizedWeight {
    /// Name of the initializer.
    pub name: String,
    /// Element type: i4, i8 or i16, or a float type for what is not quantized.
    pub dtype: DType,
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub columns: usize,
}

/// Which model an artifact was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// `model_type` of config.json.
    pub model_type: String,
    /// SHA-256 of config.json, as it is in the artifact.
    pub config_sha256: Option<String>,
    /// Files with the checkpoint's weights; empty for random weights.
    pub checkpoint: Vec<FileHash>,
    /// Seed of random weights; such an artifact is for profiling only.
    pub random_seed: Option<u64>,
    /// Checkpoint tensors that the graphs hold.
    pub tensors_read: usize,
    /// Number of the model's layers, of which the artifact may be a slice.
    pub num_layers: usize,
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
}

/// A file's identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    /// Bare name.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// SHA-256, in hexadecimal.
    pub sha256: String,
}

/// Where the vocabulary projection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HeadSource {
    /// The embedding.
    Tied,
    /// A tensor of its own.
    Stored,
}

/// Memory of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBytesEntry {
    /// Bytes of the caches with each layer's own length.
    pub hybrid: u64,
    /// Bytes if every layer kept the whole context.
    pub uniform: u64,
    /// The difference.
    pub saved: u64,
    /// Bytes of an element in the three numbers above: 16-bit entries, as on a phone.
    pub bytes_per_element: usize,
    /// Bytes of this graph's own cache inputs, in its own element type.
    pub graph_inputs: u64,
}

/// What a graph does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GraphRole {
    /// The step.
    Step,
    /// A part of the vocabulary projection: the hidden state in, logits of these rows out.
    Head {
        /// Vocabulary rows.
        rows: Range<usize>,
    },
}

/// One graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphEntry {
    /// Bare name of the model file.
    pub file: String,
    /// What it does.
    pub role: GraphRole,
    /// Length of the model file.
    pub bytes: u64,
    /// SHA-256 of the model file, which has the weights' places but not the weights.
    pub sha256: String,
    /// Names of the values after each layer, for checking.
    pub layer_hidden: Vec<String>,
    /// Number of nodes of each operator.
    pub op_counts: BTreeMap<String, usize>,
    /// What the nodes are there for, by their names: the model file has no place for it that every
    /// reader takes.
    pub tags: Vec<TaggedNodes>,
}

/// Nodes with the same tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaggedNodes {
    /// What they are there for.
    #[serde(flatten)]
    pub tag: Tag,
    /// Their names, in the order of execution.
    pub nodes: Vec<String>,
}

impl TaggedNodes {
    /// The tags of a graph, in the order in which they first appear.
    pub(crate) fn of(graph: &Graph) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        let mut places: HashMap<Tag, usize> = HashMap::new();
        for node in graph.nodes() {
            let Some(tag) = node.tag else { continue };
            let place = *places.entry(tag).or_insert(all.len());
            if place == all.len() {
                all.push(Self { tag, nodes: Vec::new() });
            }
            if let Some(tagged) = all.get_mut(place) {
                tagged.nodes.push(node.name.clone());
            }
        }
        all
    }
}

impl GraphEntry {
    /// Says of the nodes of `graph`, which was read back, what they are there for.
    pub(crate) fn tag(&self, graph: &mut Graph) {
        let named = |tagged: &TaggedNodes| {
            let tag = tagged.tag;
            tagged.nodes.iter().map(move |name| (name.clone(), tag)).collect::<Vec<_>>()
        };
        let tags: HashMap<String, Tag> = self.tags.iter().flat_map(named).collect();
        graph.tag_nodes(|name| tags.get(name).copied());
    }
}

/// A file with weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataEntry {
    /// Bare name.
    pub file: String,
    /// Length.
    pub bytes: u64,
    /// XXH3-128 of the content, in hexadecimal: finds damage, proves no origin.
    pub xxh3: String,
}

/// The embedding table in the artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EmbeddingEntry {
    /// A raw file, row-major from byte 0.
    File {
        /// Bare name.
        file: String,
        /// Element type.
        dtype: DType,
        /// Rows and columns.
        shape: [usize; 2],
    },
    /// The tied head's initializer in the step's graph.
    Initializer {
        /// Its name.
        name: String,
        /// Element type.
        dtype: DType,
        /// Rows and columns.
        shape: [usize; 2],
    },
}

impl Manifest {
    /// What the graphs do together: the step's contract with logits, where a sharded head makes
    /// them.
    ///
    /// # Errors
    /// When the step's geometry is impossible.
    pub fn contract(&self) -> Result<StepSpec, ArtifactError> {
        if self.graphs.len() > 1 {
            Ok(self.step.with_logits(self.options.logits)?)
        } else {
            Ok(self.step.clone())
        }
    }

    /// Inputs and outputs of the step's graph that are integers.
    pub fn ports(&self) -> &[PortEncoding] {
        self.quantization.as_ref().map_or(&[][..], |quantization| &quantization.ports)
    }

    /// Whether the artifact yields logits.
    pub fn has_head(&self) -> bool {
        self.options.logits != Logits::Hidden
    }

    /// Names of all files of the artifact, the manifest's own included.
    fn files(&self) -> Vec<&str> {
        let mut files = vec![MANIFEST];
        files.extend(self.graphs.iter().map(|graph| graph.file.as_str()));
        files.extend(self.data.iter().map(|data| data.file.as_str()));
        files.extend(self.copied.iter().map(|copied| copied.name.as_str()));
        files
    }

    /// Whether `folder` is an artifact and nothing else, so that nothing is lost with it.
    ///
    /// # Errors
    /// A clause that says what it is or holds besides.
    pub fn owns(folder: &Path) -> Result<(), String> {
        let manifest = Self::read(folder).map_err(|_| "is no firesteel artifact".to_owned())?;
        let files = manifest.files();
        let entries = fs::read_dir(folder).map_err(|error| format!("cannot be read: {error}"))?;
        for entry in entries {
            let entry = entry.map_err(|error| format!("cannot be read: {error}"))?;
            let name = entry.file_name();
            if !name.to_str().is_some_and(|name| files.contains(&name)) {
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
    pub fn read(folder: &Path) -> Result<Self, ArtifactError> {
        let file = folder.join(MANIFEST);
        let problem = |problem: String| ArtifactError::Manifest { file: file.clone(), problem };
        let manifest: Self = DOCUMENT.read(&file)?;
        manifest.step.validate()?;
        for port in manifest.ports() {
            port.encoding.validate().map_err(|error| problem(format!("{}: {error}", port.name)))?;
        }
        let names =
            manifest.files().into_iter().chain(manifest.embedding.iter().filter_map(|entry| {
                match entry {
                    EmbeddingEntry::File { file, .. } => Some(file.as_str()),
                    EmbeddingEntry::Initializer { .. } => None,
                }
            }));
        for name in names {
            if Path::new(name).file_name().is_none_or(|plain| plain != name) {
                return Err(problem(format!("{name:?} is not a bare file name")));
            }
        }
        let (step, heads) = match manifest.graphs.split_first() {
            Some((first, heads)) if first.role == GraphRole::Step => (first, heads),
            _ => return Err(problem("the first graph is not the step".into())),
        };
        if step.layer_hidden.len() != manifest.step.layers.len() {
            return Err(problem("layer_hidden does not name every layer".into()));
        }
        let mut row = 0;
        for head in heads {
            match &head.role {
                GraphRole::Head { rows } if rows.start == row && rows.end > row => row = rows.end,
                _ => return Err(problem(format!("{}: rows are missing or repeated", head.file))),
            }
        }
        let sharded = !heads.is_empty();
        if sharded && (row != manifest.step.vocab_size || manifest.step.logits != Logits::Hidden) {
            return Err(problem("the parts of the head do not make the vocabulary".into()));
        }
        Ok(manifest)
    }
}
