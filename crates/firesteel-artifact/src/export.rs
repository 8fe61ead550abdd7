use crate::manifest::{KvBytesEntry, ModelEntry};
use crate::open::{sha256, xxh3};
use crate::{
    Artifact, ArtifactError, DataEntry, EmbeddingEntry, FORMAT_VERSION, FileHash, GraphEntry,
    GraphRole, HeadSource, MANIFEST, Manifest, Quantization, TaggedNodes,
};
use firesteel_checkpoint::{
    Checkpoint, CheckpointFile, Head, LayerKind, ModelConfig, Replace, StagedFolder,
};
use firesteel_export::{ExportOptions, StepGraphs, WeightSource, build, linear_weight, lint};
use firesteel_graph::{Constant, ConstantSource, Graph};
use firesteel_onnx::{ModelFile, RawFile, WritePlan, WriteReport, read_model};
use firesteel_step::{Logits, StepSpec, kv_bytes};
use firesteel_tensor::DType;
use fs_err as fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the step's model file.
const MODEL: &str = "model.onnx";

/// Its name when the ranges of activations are made up.
const UNCALIBRATED_MODEL: &str = "model-uncalibrated.onnx";

/// Name of the raw embedding table.
const EMBEDDING: &str = "embedding.bin";

/// Files that are copied from the checkpoint where it has them, the config first.
const COPIED: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Largest file that is copied along.
const COPY_LIMIT: u64 = 256 << 20;

/// Bytes of an element in reported KV memory: phones keep 16-bit entries.
const KV_ELEMENT_BYTES: usize = 2;

/// What to export, and how.
pub struct ExportRequest<'a> {
    /// The model.
    pub checkpoint: &'a Checkpoint,
    /// The step.
    pub options: ExportOptions,
    /// Whether the embedding table is written as a raw file for hosts.
    pub embedding: bool,
    /// Seed, when the checkpoint's weights are random.
    pub random_seed: Option<u64>,
    /// Whether an existing artifact is replaced.
    pub force: bool,
    /// Threads that convert and write, 1 to 8.
    pub threads: usize,
}

/// Writes the artifact `out`, complete or not at all. `progress` hears bytes done and in all, from
/// any thread.
///
/// Weights stream from the mapped checkpoint into the artifact; the memory used does not depend
/// on the model. What was written is read back and checked before the folder appears.
///
/// # Errors
/// When the options do not fit, `out` exists, a weight does not fit the precision, or writing
/// fails. Nothing is left at `out` then.
pub fn export(
    request: &ExportRequest<'_>,
    out: &Path,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Artifact, ArtifactError> {
    let ExportRequest { checkpoint, options, .. } = request;
    let built = build(checkpoint, options)?;
    let embedding = request.embedding.then(|| options.precision.dtype());
    let mut draft = Draft::of_checkpoint(checkpoint, options, &built, embedding)?;
    draft.model.random_seed = request.random_seed;
    write_artifact(&draft, out, Write { force: request.force, threads: request.threads }, progress)
}

/// An artifact that is not written yet.
pub struct Draft<'a> {
    /// The graphs.
    pub graphs: &'a StepGraphs,
    /// Options that made them.
    pub options: ExportOptions,
    /// The model. Hashes of the checkpoint are added when they are not there.
    pub model: ModelEntry,
    /// Its config.
    pub config: &'a ModelConfig,
    /// Where the vocabulary projection comes from.
    pub head: Option<HeadSource>,
    /// The embedding table as a raw file.
    pub raw_files: Vec<RawFile>,
    /// Where a host finds it.
    pub embedding: Option<EmbeddingEntry>,
    /// Names and contents of further files, config.json first.
    pub side_files: Vec<(String, Vec<u8>)>,
    /// How the graphs are quantized.
    pub quantization: Option<Quantization>,
    /// What was quantized or exported, whose hashes are to be taken and whose files are not to be
    /// overwritten.
    checkpoint: Option<&'a Checkpoint>,
    source: Option<PathBuf>,
}

/// How an artifact is written.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    /// Whether an existing artifact is replaced.
    pub force: bool,
    /// Threads that convert and write, 1 to 8.
    pub threads: usize,
}

impl<'a> Draft<'a> {
    /// The draft of `graphs`, made from `checkpoint` with `options`. The embedding table becomes a
    /// raw file of the type `embedding`, if one is given.
    ///
    /// # Errors
    /// When a file of the checkpoint that is copied along cannot be read or is too large.
    pub fn of_checkpoint(
        checkpoint: &'a Checkpoint,
        options: &ExportOptions,
        graphs: &'a StepGraphs,
        embedding: Option<DType>,
    ) -> Result<Self, ArtifactError> {
        let config = checkpoint.config();
        let head = (options.logits != Logits::Hidden).then(|| match checkpoint.head() {
            Head::Tied => HeadSource::Tied,
            Head::Stored(_) => HeadSource::Stored,
        });
        Ok(Self {
            graphs,
            options: options.clone(),
            model: ModelEntry {
                model_type: config.family.model_type().to_owned(),
                config_sha256: None,
                checkpoint: Vec::new(),
                random_seed: None,
                tensors_read: graphs.tensors_read,
                num_layers: config.num_layers(),
                eos_token_ids: config.eos_token_ids.clone(),
            },
            config,
            head,
            raw_files: raw_files(checkpoint, options, embedding),
            embedding: embedding_entry(checkpoint, options, head, embedding),
            side_files: side_files(checkpoint)?,
            quantization: None,
            checkpoint: Some(checkpoint),
            source: checkpoint.path().map(Path::to_owned),
        })
    }

    /// The draft of `graphs`, made from those of `artifact`, whose model, config and files it
    /// takes over. The embedding table becomes a raw file if `embedding`.
    ///
    /// # Errors
    /// When a file of the artifact cannot be read, or it has no embedding table that was asked for.
    pub fn of_artifact(
        artifact: &Artifact,
        config: &'a ModelConfig,
        graphs: &'a StepGraphs,
        embedding: bool,
    ) -> Result<Self, ArtifactError> {
        let manifest = artifact.manifest();
        let (mut raw_files, mut entry) = (Vec::new(), None);
        if embedding {
            let Some(table) = artifact.embedding()? else {
                let problem = "has no embedding table; export it with --embedding".into();
                return Err(ArtifactError::Content { file: artifact.folder().into(), problem });
            };
            let table = table.into_table();
            let (dtype, shape) = (table.dtype(), table.shape().to_vec());
            if let [rows, columns] = shape[..] {
                let shape = [rows, columns];
                entry = Some(EmbeddingEntry::File { file: EMBEDDING.into(), dtype, shape });
            }
            raw_files.push(RawFile {
                name: EMBEDDING.into(),
                dtype,
                shape,
                data: Constant::Tensor(table),
                ranges: Vec::new(),
            });
        }
        let mut side_files = Vec::new();
        for name in COPIED {
            if manifest.copied.iter().any(|file| file.name == name) {
                side_files.push((name.into(), read_side_file(&artifact.folder().join(name))?));
            }
        }
        Ok(Self {
            graphs,
            options: manifest.options.clone(),
            model: manifest.model.clone(),
            config,
            head: manifest.head,
            raw_files,
            embedding: entry,
            side_files,
            quantization: None,
            checkpoint: None,
            source: Some(artifact.folder().to_owned()),
        })
    }

    /// Name of the step's model file.
    fn model_name(&self) -> &'static str {
        match &self.quantization {
            Some(quantization) if !quantization.calibrated => UNCALIBRATED_MODEL,
            _ => MODEL,
        }
    }

    fn model_files(&self) -> Vec<ModelFile<'_>> {
        let options = &self.options;
        let model = |name: String, graph: &'a Graph| ModelFile {
            data_file: format!("{name}.data"),
            name,
            graph,
            opset: options.dialect.opset(),
            producer_version: env!("CARGO_PKG_VERSION").into(),
            metadata: vec![
                ("firesteel.dialect".into(), options.dialect.to_string()),
                ("firesteel.context".into(), options.context.to_string()),
                ("firesteel.tokens".into(), options.tokens.to_string()),
            ],
        };
        let mut models = vec![model(self.model_name().into(), &self.graphs.graph)];
        models.extend(
            self.graphs
                .heads
                .iter()
                .map(|head| model(format!("{}.onnx", head.graph.name()), &head.graph)),
        );
        models
    }
}

/// Writes `draft` as the folder `out`, complete or not at all. What was written is read back and
/// checked before the folder appears. `progress` hears bytes done and in all, from any thread.
///
/// # Errors
/// When `out` exists, constant data cannot be made, or writing fails. Nothing is left at `out`
/// then.
pub fn write_artifact(
    draft: &Draft<'_>,
    out: &Path,
    how: Write,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Artifact, ArtifactError> {
    if how.force {
        refuse_source(draft.source.as_deref(), out)?;
    }
    let replace = if how.force { Replace::If(&Manifest::owns) } else { Replace::Never };
    let staged = StagedFolder::create(out, replace)?;
    let plan = WritePlan::new(draft.model_files(), draft.raw_files.clone())?;
    let total = plan.data_bytes();
    staged.require_space(total)?;
    // Hashing reads what converting reads, so it runs beside it while the pages are warm.
    let hash = || draft.checkpoint.map_or_else(Vec::new, checkpoint_hashes);
    let (report, hashes) = std::thread::scope(|scope| {
        let hashing = std::thread::Builder::new().spawn_scoped(scope, hash);
        let report = plan.write(staged.path(), how.threads, &|done| progress(done, total));
        (report, hashing.map(|thread| thread.join()))
    });
    let report = report?;
    let hashes = match hashes {
        Ok(Ok(hashes)) => hashes,
        // Where no thread can be had, or it failed, it is done after the fact.
        _ => hash(),
    };
    let mut model = draft.model.clone();
    model.checkpoint.extend(hashes);
    let graphs = graph_entries(draft.graphs, &report, staged.path())?;
    let copied = write_side_files(&draft.side_files, staged.path())?;
    let data = data_entries(&report, staged.path())?;
    let manifest = manifest(draft, Parts { data, model, graphs, copied })?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(std::io::Error::other)?;
    fs::write(staged.path().join(MANIFEST), text)?;
    verify(&Artifact::open(staged.path())?)?;
    let folder = staged.commit()?;
    Artifact::open(&folder)
}

/// The embedding table, and where in it the parts of a tied head lie.
fn raw_files(
    checkpoint: &Checkpoint,
    options: &ExportOptions,
    embedding: Option<DType>,
) -> Vec<RawFile> {
    let Some(dtype) = embedding else { return Vec::new() };
    let weight = checkpoint.embedding();
    let row_bytes = checkpoint.config().hidden_size as u64 * dtype.size() as u64;
    let mut ranges = Vec::new();
    if matches!(checkpoint.head(), Head::Tied) && options.head_shards > 1 {
        let (rows, shards) = (checkpoint.config().vocab_size, options.head_shards);
        for shard in 0..shards {
            let range = firesteel_export::head_rows(rows, shard, shards);
            let start = range.start as u64;
            if let Some(part) = weight.rows(range)
                && let Some(key) = WeightSource::new(part, dtype).key()
            {
                ranges.push((key, start * row_bytes));
            }
        }
    }
    vec![RawFile {
        name: EMBEDDING.into(),
        dtype,
        shape: weight.shape().to_vec(),
        data: Constant::Source(Arc::new(WeightSource::new(weight.clone(), dtype))),
        ranges,
    }]
}

fn graph_entries(
    built: &StepGraphs,
    report: &WriteReport,
    folder: &Path,
) -> Result<Vec<GraphEntry>, ArtifactError> {
    let step = (&built.graph, GraphRole::Step, built.layer_hidden.clone());
    let heads = built
        .heads
        .iter()
        .map(|head| (&head.graph, GraphRole::Head { rows: head.rows.clone() }, Vec::new()));
    let mut entries = Vec::new();
    for ((graph, role, layer_hidden), written) in
        std::iter::once(step).chain(heads).zip(&report.models)
    {
        let file = written.file.name.clone();
        let sha256 = sha256(&fs::read(folder.join(&file))?);
        let bytes = written.file.bytes;
        let (op_counts, tags) = (graph.op_counts(), TaggedNodes::of(graph));
        entries.push(GraphEntry { file, role, bytes, sha256, layer_hidden, op_counts, tags });
    }
    Ok(entries)
}

fn data_entries(report: &WriteReport, folder: &Path) -> Result<Vec<DataEntry>, ArtifactError> {
    report
        .data
        .iter()
        .map(|file| {
            let (_, xxh3) = xxh3(&folder.join(&file.name))?;
            Ok(DataEntry { file: file.name.clone(), bytes: file.bytes, xxh3 })
        })
        .collect()
}

/// Refuses an output folder that holds the checkpoint, which `--force` would remove.
fn refuse_source(source: Option<&Path>, out: &Path) -> Result<(), ArtifactError> {
    let (Some(source), Ok(out)) = (source, fs::canonicalize(out)) else {
        return Ok(());
    };
    if !fs::canonicalize(source)?.starts_with(&out) {
        return Ok(());
    }
    let problem = "holds the checkpoint; choose another folder".into();
    Err(ArtifactError::Content { file: out, problem })
}

fn hash_file(file: &CheckpointFile) -> FileHash {
    FileHash {
        name: file.name.clone(),
        bytes: file.bytes.len() as u64,
        sha256: sha256(&file.bytes),
    }
}

/// Identities of the files with the weights of `checkpoint`; none for random weights.
pub fn checkpoint_hashes(checkpoint: &Checkpoint) -> Vec<FileHash> {
    let files = checkpoint.files().iter().filter(|file| file.name != COPIED[0]);
    files.map(hash_file).collect()
}

fn side_files(checkpoint: &Checkpoint) -> Result<Vec<(String, Vec<u8>)>, ArtifactError> {
    let mut files = Vec::new();
    for name in COPIED {
        let content = match checkpoint.side_file(name)? {
            Some(source) => read_side_file(&source)?,
            // Random weights have a config all the same.
            None if name == COPIED[0] => checkpoint.config().to_json().into_bytes(),
            None => continue,
        };
        files.push((name.into(), content));
    }
    Ok(files)
}

fn read_side_file(file: &Path) -> Result<Vec<u8>, ArtifactError> {
    let bytes = fs::metadata(file)?.len();
    if bytes > COPY_LIMIT {
        let problem = format!("has {bytes} bytes; up to {COPY_LIMIT} are copied");
        return Err(ArtifactError::Content { file: file.into(), problem });
    }
    Ok(fs::read(file)?)
}

fn write_side_files(
    files: &[(String, Vec<u8>)],
    folder: &Path,
) -> Result<Vec<FileHash>, ArtifactError> {
    let mut written = Vec::new();
    for (name, content) in files {
        fs::write(folder.join(name), content)?;
        written.push(FileHash {
            name: name.clone(),
            bytes: content.len() as u64,
            sha256: sha256(content),
        });
    }
    Ok(written)
}

/// What was written.
struct Parts {
    data: Vec<DataEntry>,
    model: ModelEntry,
    graphs: Vec<GraphEntry>,
    copied: Vec<FileHash>,
}

fn manifest(draft: &Draft<'_>, parts: Parts) -> Result<Manifest, ArtifactError> {
    let Draft { graphs: built, options, .. } = draft;
    let overflow = || ArtifactError::Manifest {
        file: PathBuf::from(MANIFEST),
        problem: format!("the KV bytes at context {} overflow", options.context),
    };
    let memory = kv_bytes(
        draft.config,
        options.layers.clone(),
        options.context,
        options.cache_layout,
        KV_ELEMENT_BYTES,
    )
    .ok_or_else(overflow)?;
    let config_sha256 =
        parts.copied.iter().find(|file| file.name == COPIED[0]).map(|file| file.sha256.clone());
    let ports = draft.quantization.as_ref().map_or(&[][..], |known| &known.ports);
    let graph_inputs = built.spec.clone().with_encodings(ports).cache_bytes() as u64;
    Ok(Manifest {
        format: "firesteel-artifact".into(),
        format_version: FORMAT_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").into(),
        model: ModelEntry { config_sha256, ..parts.model },
        options: options.clone(),
        opset: options.dialect.opset(),
        step: built.spec.clone(),
        layer_types: built.spec.layers.iter().map(|layer| layer.kind).collect(),
        head: draft.head,
        unused_inputs: unused_inputs(&built.spec),
        wide: built.wide.clone(),
        kv_bytes: KvBytesEntry {
            hybrid: memory.hybrid,
            uniform: memory.uniform,
            saved: memory.saved,
            bytes_per_element: KV_ELEMENT_BYTES,
            graph_inputs,
        },
        graphs: parts.graphs,
        data: parts.data,
        embedding: draft.embedding.clone(),
        copied: parts.copied,
        quantization: draft.quantization.clone(),
    })
}

/// Inputs of the whole contract that a slice with one kind of layer does not have.
fn unused_inputs(spec: &StepSpec) -> Vec<String> {
    let missing = |kind| spec.first_of(kind).is_none();
    let names = |suffix: &str| ["cos", "sin", "mask"].map(|name| format!("{name}_{suffix}"));
    let mut unused = Vec::new();
    if missing(LayerKind::Sliding) {
        unused.extend(names("sw"));
    }
    if missing(LayerKind::Full) {
        unused.extend(names("full"));
    }
    unused
}

fn embedding_entry(
    checkpoint: &Checkpoint,
    options: &ExportOptions,
    head: Option<HeadSource>,
    embedding: Option<DType>,
) -> Option<EmbeddingEntry> {
    let weight = checkpoint.embedding();
    let shape = [*weight.shape().first()?, *weight.shape().get(1)?];
    if let Some(dtype) = embedding {
        return Some(EmbeddingEntry::File { file: EMBEDDING.into(), dtype, shape });
    }
    let whole = options.head_shards == 1;
    (head == Some(HeadSource::Tied) && whole).then(|| EmbeddingEntry::Initializer {
        name: weight.name().to_owned(),
        dtype: options.precision.dtype(),
        shape,
    })
}

/// Reads every graph back as a stranger would, lints what was read, and compares the quantized
/// weights with the manifest's list.
fn verify(artifact: &Artifact) -> Result<(), ArtifactError> {
    let manifest = artifact.manifest();
    let mut weights = Vec::new();
    for entry in &manifest.graphs {
        let file = artifact.graph_path(entry);
        let model = read_model(&file)?;
        let problem = |problem: String| ArtifactError::Content { file: file.clone(), problem };
        if model.opset != manifest.opset {
            return Err(problem(format!("has opset {}", model.opset)));
        }
        if let Some(finding) = lint(&model.graph, manifest.options.dialect).first() {
            return Err(problem(finding.to_string()));
        }
        if model.graph.op_counts() != entry.op_counts {
            return Err(problem("reads back with other operators".into()));
        }
        for node in model.graph.nodes() {
            let Some(weight) = linear_weight(&model.graph, node) else { continue };
            let value = model.graph.value(weight);
            weights.push((value.name.clone(), value.dtype, value.shape.clone()));
        }
        if entry.role == GraphRole::Step {
            let spec = artifact.graph_spec(true);
            crate::EvaluatorRunner::new(model.graph, spec)
                .map_err(|source| ArtifactError::Graph { file, source: Box::new(source) })?;
        }
    }
    let Some(quantization) = &manifest.quantization else { return Ok(()) };
    let planned = quantization.weights.iter();
    let planned = planned.map(|w| (w.name.clone(), w.dtype, vec![w.rows, w.columns]));
    let mut planned: Vec<(String, DType, Vec<usize>)> = planned.collect();
    planned.sort();
    weights.sort();
    let differing = planned.iter().zip(&weights).find(|(planned, found)| planned != found);
    let problem = match differing {
        None if planned.len() == weights.len() => return Ok(()),
        None => format!("{} matrices were planned, {} are there", planned.len(), weights.len()),
        Some(((name, dtype, shape), found)) => {
            format!("{name} was planned as {dtype} {shape:?}, {found:?} is there")
        }
    };
    Err(ArtifactError::Manifest { file: artifact.folder().join(MANIFEST), problem })
}
