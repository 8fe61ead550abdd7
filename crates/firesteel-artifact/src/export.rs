use crate::manifest::{KvBytesEntry, ModelEntry};
use crate::open::{data_hash, hex};
use crate::{
    Artifact, ArtifactError, DataEntry, EmbeddingEntry, FORMAT_VERSION, FileHash, GraphEntry,
    GraphRole, HeadSource, MANIFEST, Manifest,
};
use firesteel_checkpoint::{Checkpoint, CheckpointFile, Head, LayerKind, Replace, StagedFolder};
use firesteel_export::{ExportOptions, StepGraphs, WeightSource, build, lint};
use firesteel_graph::{Constant, ConstantSource, Graph};
use firesteel_onnx::{ModelFile, RawFile, WritePlan, WriteReport, read_model};
use firesteel_step::{Logits, StepSpec, kv_bytes};
use firesteel_tensor::DType;
use fs_err as fs;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Name of the step's model file.
const MODEL: &str = "model.onnx";

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
    if request.force {
        refuse_source(checkpoint, out)?;
    }
    let replace = if request.force { Replace::If(&Manifest::owns) } else { Replace::Never };
    let staged = StagedFolder::create(out, replace)?;
    let plan = WritePlan::new(model_files(&built, options), raw_files(request)?)?;
    let total = plan.data_bytes();
    staged.require_space(total)?;
    // Hashing reads what converting reads, so it runs beside it while the pages are warm.
    let weight_files: Vec<&CheckpointFile> =
        checkpoint.files().iter().filter(|file| file.name != COPIED[0]).collect();
    let hash = || weight_files.iter().map(|file| hash_file(file)).collect::<Vec<FileHash>>();
    let (report, hashes) = std::thread::scope(|scope| {
        let hashing = std::thread::Builder::new().spawn_scoped(scope, hash);
        let report = plan.write(staged.path(), request.threads, &|done| progress(done, total));
        (report, hashing.map(|thread| thread.join()))
    });
    let report = report?;
    let hashes = match hashes {
        Ok(Ok(hashes)) => hashes,
        // Where no thread can be had, or it failed, it is done after the fact.
        _ => hash(),
    };
    let graphs = graph_entries(&built, &report, staged.path())?;
    let copied = copy_files(checkpoint, staged.path())?;
    let data = data_entries(&report, staged.path())?;
    let manifest = manifest(request, &built, Parts { data, hashes, graphs, copied })?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(std::io::Error::other)?;
    fs::write(staged.path().join(MANIFEST), text)?;
    verify(&Artifact::open(staged.path())?)?;
    let folder = staged.commit()?;
    Artifact::open(&folder)
}

fn model_files<'a>(built: &'a StepGraphs, options: &ExportOptions) -> Vec<ModelFile<'a>> {
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
    let mut models = vec![model(MODEL.into(), &built.graph)];
    models.extend(
        built.heads.iter().map(|head| model(format!("{}.onnx", head.graph.name()), &head.graph)),
    );
    models
}

/// The embedding table, and where in it the parts of a tied head lie.
fn raw_files(request: &ExportRequest<'_>) -> Result<Vec<RawFile>, ArtifactError> {
    if !request.embedding {
        return Ok(Vec::new());
    }
    let (checkpoint, options) = (request.checkpoint, &request.options);
    let (weight, dtype) = (checkpoint.embedding(), options.precision.dtype());
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
    Ok(vec![RawFile {
        name: EMBEDDING.into(),
        dtype,
        shape: weight.shape().to_vec(),
        data: Constant::Source(Arc::new(WeightSource::new(weight.clone(), dtype))),
        ranges,
    }])
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
        let sha256 = hex(&Sha256::digest(fs::read(folder.join(&file))?));
        let bytes = written.file.bytes;
        let op_counts = graph.op_counts();
        entries.push(GraphEntry { file, role, bytes, sha256, layer_hidden, op_counts });
    }
    Ok(entries)
}

fn data_entries(report: &WriteReport, folder: &Path) -> Result<Vec<DataEntry>, ArtifactError> {
    report
        .data
        .iter()
        .map(|file| {
            let xxh3 = data_hash(&folder.join(&file.name))?;
            Ok(DataEntry { file: file.name.clone(), bytes: file.bytes, xxh3 })
        })
        .collect()
}

/// Refuses an output folder that holds the checkpoint, which `--force` would remove.
fn refuse_source(checkpoint: &Checkpoint, out: &Path) -> Result<(), ArtifactError> {
    let (Some(source), Ok(out)) = (checkpoint.path(), fs::canonicalize(out)) else {
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
        sha256: hex(&Sha256::digest(&*file.bytes)),
    }
}

fn copy_files(checkpoint: &Checkpoint, folder: &Path) -> Result<Vec<FileHash>, ArtifactError> {
    let mut copied = Vec::new();
    for name in COPIED {
        let content = match checkpoint.side_file(name)? {
            Some(source) => {
                let bytes = fs::metadata(&source)?.len();
                if bytes > COPY_LIMIT {
                    let problem = format!("has {bytes} bytes; up to {COPY_LIMIT} are copied");
                    return Err(ArtifactError::Content { file: source, problem });
                }
                fs::read(&source)?
            }
            // Random weights have a config all the same.
            None if name == COPIED[0] => checkpoint.config().to_json().into_bytes(),
            None => continue,
        };
        fs::write(folder.join(name), &content)?;
        copied.push(FileHash {
            name: name.into(),
            bytes: content.len() as u64,
            sha256: hex(&Sha256::digest(&content)),
        });
    }
    Ok(copied)
}

/// What was written.
struct Parts {
    data: Vec<DataEntry>,
    hashes: Vec<FileHash>,
    graphs: Vec<GraphEntry>,
    copied: Vec<FileHash>,
}

fn manifest(
    request: &ExportRequest<'_>,
    built: &StepGraphs,
    parts: Parts,
) -> Result<Manifest, ArtifactError> {
    let ExportRequest { checkpoint, options, .. } = request;
    let config = checkpoint.config();
    let overflow = || ArtifactError::Manifest {
        file: PathBuf::from(MANIFEST),
        problem: format!("the KV bytes at context {} overflow", options.context),
    };
    let memory = kv_bytes(
        config,
        options.layers.clone(),
        options.context,
        options.cache_layout,
        KV_ELEMENT_BYTES,
    )
    .ok_or_else(overflow)?;
    let head = (options.logits != Logits::Hidden).then(|| match checkpoint.head() {
        Head::Tied => HeadSource::Tied,
        Head::Stored(_) => HeadSource::Stored,
    });
    let config_sha256 =
        parts.copied.iter().find(|file| file.name == COPIED[0]).map(|file| file.sha256.clone());
    Ok(Manifest {
        format: "firesteel-artifact".into(),
        format_version: FORMAT_VERSION,
        tool_version: env!("CARGO_PKG_VERSION").into(),
        model: ModelEntry {
            model_type: config.model_type.clone(),
            config_sha256,
            checkpoint: parts.hashes,
            random_seed: request.random_seed,
            tensors_read: built.tensors_read,
            num_layers: config.num_layers(),
            eos_token_ids: config.eos_token_ids.clone(),
        },
        options: options.clone(),
        opset: options.dialect.opset(),
        step: built.spec.clone(),
        layer_types: built.spec.layers.iter().map(|layer| layer.kind).collect(),
        head,
        unused_inputs: unused_inputs(&built.spec),
        wide: built.wide.clone(),
        kv_bytes: KvBytesEntry {
            hybrid: memory.hybrid,
            uniform: memory.uniform,
            saved: memory.saved,
            bytes_per_element: KV_ELEMENT_BYTES,
            graph_inputs: built.spec.cache_bytes() as u64,
        },
        graphs: parts.graphs,
        data: parts.data,
        embedding: embedding_entry(request, head, options.precision.dtype()),
        copied: parts.copied,
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
    request: &ExportRequest<'_>,
    head: Option<HeadSource>,
    dtype: DType,
) -> Option<EmbeddingEntry> {
    let weight = request.checkpoint.embedding();
    let shape = [*weight.shape().first()?, *weight.shape().get(1)?];
    if request.embedding {
        return Some(EmbeddingEntry::File { file: EMBEDDING.into(), dtype, shape });
    }
    let whole = request.options.head_shards == 1;
    (head == Some(HeadSource::Tied) && whole).then(|| EmbeddingEntry::Initializer {
        name: weight.name().to_owned(),
        dtype,
        shape,
    })
}

/// Reads every graph back as a stranger would and lints what was read.
fn verify(artifact: &Artifact) -> Result<(), ArtifactError> {
    let manifest = artifact.manifest();
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
        if entry.role == GraphRole::Step {
            let spec = artifact.step_spec(true);
            crate::EvaluatorRunner::new(model.graph, spec)
                .map_err(|source| ArtifactError::Graph { file, source: Box::new(source) })?;
        }
    }
    Ok(())
}
