use crate::{
    ArtifactError, EmbeddingEntry, EvaluatorRunner, GraphEntry, HeadRunner, MANIFEST, Manifest,
    ShardedRunner,
};
use firesteel_checkpoint::{CheckpointError, MappedFile, file_in};
use firesteel_graph::{Constant, Evaluator, Graph};
use firesteel_onnx::read_model;
use firesteel_step::{Embedding, EncodedRunner, Role, Runner, RunnerError, StepSpec};
use firesteel_tensor::{Tensor, TensorView, read_f32};
use fs_err as fs;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// An artifact on disk. Weights stay in mapped files.
#[derive(Debug, Clone)]
pub struct Artifact {
    folder: PathBuf,
    manifest: Manifest,
}

impl Artifact {
    /// Whether `path` looks like an artifact: a folder with a manifest, and without the weights of
    /// a checkpoint, whose folder may hold another program's manifest.
    pub fn is_artifact(path: &Path) -> bool {
        let has = |name: &str| path.join(name).is_file();
        has(MANIFEST) && !has("model.safetensors") && !has("model.safetensors.index.json")
    }

    /// Opens a folder: reads the manifest and compares the files with it; of the weights only the
    /// length, see [`Artifact::verify`].
    ///
    /// # Errors
    /// When the manifest is not understood, or a graph or data file is missing or another.
    pub fn open(folder: &Path) -> Result<Self, ArtifactError> {
        let manifest = Manifest::read(folder)?;
        let artifact = Self { folder: folder.to_owned(), manifest };
        for data in &artifact.manifest.data {
            artifact.check_length(&data.file, data.bytes)?;
        }
        for graph in &artifact.manifest.graphs {
            artifact.check_length(&graph.file, graph.bytes)?;
            artifact.check_sha256(&graph.file, &graph.sha256)?;
        }
        for copied in &artifact.manifest.copied {
            artifact.check_length(&copied.name, copied.bytes)?;
            artifact.check_sha256(&copied.name, &copied.sha256)?;
        }
        Ok(artifact)
    }

    /// Reads every file and compares it with its hash in the manifest.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn verify(&self) -> Result<(), ArtifactError> {
        for data in &self.manifest.data {
            let file = self.folder.join(&data.file);
            let (_, actual) = xxh3(&file)?;
            if actual != data.xxh3 {
                let problem = format!(
                    "is damaged: XXH3 is {actual}, the manifest has {}; export it again",
                    data.xxh3
                );
                return Err(ArtifactError::Content { file, problem });
            }
        }
        Ok(())
    }

    fn check_sha256(&self, name: &str, expected: &str) -> Result<(), ArtifactError> {
        let file = self.folder.join(name);
        let actual = sha256(&fs::read(&file)?);
        if actual == expected {
            return Ok(());
        }
        let problem = format!("SHA-256 is {actual}, the manifest has {expected}");
        Err(ArtifactError::Content { file, problem })
    }

    fn check_length(&self, name: &str, bytes: u64) -> Result<(), ArtifactError> {
        let file = self.folder.join(name);
        let actual = fs::metadata(file_in(&self.folder, name)?.as_deref().unwrap_or(&file))?.len();
        if actual == bytes {
            return Ok(());
        }
        let problem = format!("has {actual} bytes, the manifest has {bytes}");
        Err(ArtifactError::Content { file, problem })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Path of a graph's model file.
    pub fn graph_path(&self, graph: &GraphEntry) -> PathBuf {
        self.folder.join(&graph.file)
    }

    /// Contract of the step's own graph; with `layer_outputs` the values after each layer are
    /// further outputs, under their names in the graph.
    pub fn step_spec(&self, layer_outputs: bool) -> StepSpec {
        let spec = self.manifest.step.clone();
        if !layer_outputs {
            return spec;
        }
        let mut spec = spec.with_layer_outputs();
        let names = self.manifest.graphs.first().map_or(&[][..], |graph| &graph.layer_hidden);
        for output in &mut spec.outputs {
            if let Role::LayerHidden(i) = output.role
                && let Some(name) = names.get(i)
            {
                output.name.clone_from(name);
            }
        }
        spec
    }

    /// As [`step_spec`](Self::step_spec), with the element types that the step's graph has; they
    /// differ where it takes or gives integers.
    pub fn graph_spec(&self, layer_outputs: bool) -> StepSpec {
        self.step_spec(layer_outputs).with_encodings(self.manifest.ports())
    }

    /// Reads a graph back from its file, with what its nodes are there for.
    ///
    /// # Errors
    /// When the file is not a model that this version understands.
    pub fn read_graph(&self, graph: &GraphEntry) -> Result<Graph, ArtifactError> {
        let mut read = read_model(&self.graph_path(graph))?.graph;
        graph.tag(&mut read);
        Ok(read)
    }

    /// The artifact on the graph evaluator.
    ///
    /// # Errors
    /// When a graph cannot be read or is not what the manifest says.
    pub fn evaluator(&self, layer_outputs: bool) -> Result<Box<dyn Runner>, ArtifactError> {
        let (mut step, mut heads): (Option<Box<dyn Runner>>, Vec<HeadRunner>) = (None, Vec::new());
        for (i, entry) in self.manifest.graphs.iter().enumerate() {
            let graph = self.read_graph(entry)?;
            let invalid = |source| ArtifactError::Graph {
                file: self.graph_path(entry),
                source: Box::new(source),
            };
            if i == 0 {
                let spec = self.graph_spec(layer_outputs);
                step = Some(Box::new(EvaluatorRunner::new(graph, spec).map_err(invalid)?));
            } else {
                heads.push(head_runner(Evaluator::new(graph).map_err(invalid)?));
            }
        }
        let Some(step) = step else {
            let file = self.folder.join(MANIFEST);
            return Err(ArtifactError::Manifest { file, problem: "names no graph".into() });
        };
        self.join(step, heads)
    }

    /// One runner of the artifact's contract from a runner of the step's graph
    /// ([`graph_spec`](Self::graph_spec)) and those of the head's parts, if any.
    ///
    /// # Errors
    /// When the step's runner has other ports, or the geometry is impossible.
    pub fn join(
        &self,
        mut step: Box<dyn Runner>,
        heads: Vec<HeadRunner>,
    ) -> Result<Box<dyn Runner>, ArtifactError> {
        let invalid = |error: RunnerError| ArtifactError::Manifest {
            file: self.folder.join(MANIFEST),
            problem: error.to_string(),
        };
        if !self.manifest.ports().is_empty() {
            let tapped = step.spec().outputs.iter().any(|t| matches!(t.role, Role::LayerHidden(_)));
            let spec = self.step_spec(tapped);
            let encoded = EncodedRunner::new(step, spec, self.manifest.ports());
            step = Box::new(encoded.map_err(invalid)?);
        }
        if heads.is_empty() {
            return Ok(step);
        }
        let joined = ShardedRunner::new(step, heads, self.manifest.options.logits);
        joined.map(|runner| Box::new(runner) as Box<dyn Runner>).map_err(invalid)
    }

    /// The embedding table, where the artifact holds it.
    ///
    /// # Errors
    /// When the table is not what the manifest says.
    pub fn embedding(&self) -> Result<Option<ArtifactEmbedding>, ArtifactError> {
        let table = match &self.manifest.embedding {
            None => return Ok(None),
            Some(EmbeddingEntry::File { file, dtype, shape }) => {
                let bytes = MappedFile::open(&self.folder.join(file))?.bytes();
                Tensor::new(*dtype, shape.to_vec(), bytes).map_err(|error| {
                    let problem = error.to_string();
                    ArtifactError::Content { file: self.folder.join(file), problem }
                })?
            }
            Some(EmbeddingEntry::Initializer { name, dtype, shape }) => {
                let Some(entry) = self.manifest.graphs.first() else { return Ok(None) };
                let graph = self.read_graph(entry)?;
                match graph.find(name).and_then(|id| graph.constant(id)) {
                    Some(Constant::Tensor(t)) if t.shape() == shape && t.dtype() == *dtype => {
                        t.clone()
                    }
                    _ => {
                        let problem = format!("has no initializer {name} of {dtype} {shape:?}");
                        return Err(ArtifactError::Content {
                            file: self.graph_path(entry),
                            problem,
                        });
                    }
                }
            }
        };
        let hidden = self.manifest.step.hidden_size;
        if !matches!(table.shape(), [rows, columns] if *rows > 0 && *columns == hidden)
            || !table.dtype().is_float()
        {
            let problem = format!(
                "the embedding is {} {:?}, the step takes rows of {hidden}",
                table.dtype(),
                table.shape()
            );
            return Err(ArtifactError::Manifest { file: self.folder.join(MANIFEST), problem });
        }
        Ok(Some(ArtifactEmbedding { table }))
    }
}

fn head_runner(evaluator: Evaluator) -> HeadRunner {
    Box::new(move |hidden: TensorView<'_>| {
        let fail = |message: String| RunnerError::Failed { runner: "evaluator".into(), message };
        let outputs = evaluator.run(&[hidden]).map_err(|error| fail(error.to_string()))?;
        outputs.into_iter().next().ok_or_else(|| fail("a head graph has no output".into()))
    })
}

/// The embedding table of an artifact, mapped.
#[derive(Debug, Clone)]
pub struct ArtifactEmbedding {
    table: Tensor,
}

impl ArtifactEmbedding {
    /// The embedding of `table`, one row a token.
    ///
    /// # Errors
    /// When it is no matrix of floats with rows.
    pub fn new(table: Tensor) -> Result<Self, String> {
        let floats = table.dtype().is_float();
        if matches!(table.shape(), [rows, _] if *rows > 0) && floats {
            return Ok(Self { table });
        }
        Err(format!("is {} {:?}; a matrix of floats is an embedding", table.dtype(), table.shape()))
    }

    /// The table, [rows, hidden size].
    pub(crate) fn into_table(self) -> Tensor {
        self.table
    }
}

impl Embedding for ArtifactEmbedding {
    fn hidden_size(&self) -> usize {
        self.table.shape()[1]
    }

    fn rows(&self) -> usize {
        self.table.shape()[0]
    }

    fn lookup(&self, ids: &[u32], out: &mut [f32]) -> Result<(), RunnerError> {
        let fail = |message: String| RunnerError::Failed { runner: "embedding".into(), message };
        let width = self.hidden_size();
        if out.len() != ids.len() * width {
            let problem = format!("{} values for {} rows of {width}", out.len(), ids.len());
            return Err(fail(problem));
        }
        for (id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
            let index = *id as usize;
            let source = self.table.rows(index..index + 1).ok_or_else(|| {
                fail(format!("id {id} has no row, the table has {}", self.rows()))
            })?;
            read_f32(source.dtype(), source.bytes(), row)
                .map_err(|error| fail(error.to_string()))?;
        }
        Ok(())
    }
}

/// Length and XXH3-128, in lower-case hexadecimal, of a file.
///
/// # Errors
/// When it cannot be mapped.
pub fn xxh3(file: &Path) -> Result<(u64, String), CheckpointError> {
    let bytes = MappedFile::open(file)?.bytes();
    Ok((bytes.len() as u64, format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes))))
}

/// SHA-256 of `bytes`, in lower-case hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
