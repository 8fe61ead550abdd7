use crate::manifest::{CompiledManifest, FileEntry, PartEntry, SharedEntry, StepEntry, Target};
use crate::part::{Part, parts};
use crate::{CompileError, Compiled, Libraries, Split};
use firesteel_artifact::{
    Artifact, EmbeddingEntry, MANIFEST, Manifest, Quantization, sha256, xxh3,
};
use firesteel_check::audit::{Audit, Dump, Finding, Placement, Rule, Schematic, audit};
use firesteel_checkpoint::{MappedFile, Replace, StagedFolder};
use firesteel_graph::Graph;
use firesteel_onnx::{ModelFile, WritePlan};
use firesteel_ort::OrtError;
use firesteel_ort::qnn::{
    CompileOutcome, CompileRequest, ContextModel, CpuNodes, Limits, Performance, Soc,
    WorkerCommand, compile_contexts,
};
use firesteel_step::{CacheLayout, Encoding, Role, TensorSpec};
use firesteel_tensor::DType;
use fs_err as fs;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::TryLockError;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// For whom and how to compile.
#[derive(Debug, Clone)]
pub struct CompileOptions {
    /// The chip.
    pub soc: Soc,
    /// What a host is to ask of the device. Contexts do not depend on it.
    pub performance: Performance,
    /// How the steps are cut.
    pub split: Split,
    /// Whether all steps also go into one binary with shared weights.
    pub share_weights: bool,
    /// Rules whose violations are let pass.
    pub allow: BTreeSet<Rule>,
    /// What the compiler may use for one part.
    pub limits: Limits,
    /// ONNX Runtime, or a folder that holds it.
    pub library: Option<PathBuf>,
    /// The program that does the work of the child process.
    pub worker: WorkerCommand,
    /// The folder in which finished parts wait for the others.
    pub cache: PathBuf,
    /// Whether an existing compiled artifact is replaced.
    pub force: bool,
}

/// What the caller hears while it waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CompileProgress<'a> {
    /// Another process compiles, and is waited for.
    Waiting,
    /// A part begins.
    Part {
        /// Its name.
        name: &'a str,
        /// Its number, from 1.
        number: usize,
        /// Number of parts.
        count: usize,
        /// Whether it was compiled before.
        finished: bool,
    },
    /// The compiler works.
    Working {
        /// For how long.
        time: Duration,
        /// Most memory used so far, in bytes.
        memory: u64,
    },
    /// The part is compiled.
    Done {
        /// Time that it took on this machine.
        time: Duration,
        /// Most memory that the compiler used, in bytes.
        memory: u64,
    },
}

/// Largest graph, by its constants, and largest binary: offsets in a session are signed 32-bit
/// numbers.
const SIZE_LIMIT: u64 = 2 << 30;

/// Changes when finished parts of an older program are of no use.
const CACHE_VERSION: &str = "3";

/// Compiles `artifacts`, one for each step of the same model, and writes the folder `out`, complete
/// or not at all.
///
/// Each part is compiled in a child process, audited and kept in the cache folder until all are
/// done, so that what was compiled before a failure is not compiled again.
///
/// # Errors
/// When the artifacts or options do not fit, the compiler fails, or the audit finds what is not
/// allowed. Nothing is left at `out` then.
pub fn compile(
    artifacts: &[Artifact],
    options: &CompileOptions,
    out: &Path,
    report: &mut dyn FnMut(CompileProgress<'_>),
) -> Result<Compiled, CompileError> {
    let steps = step_names(artifacts)?;
    // Compilations hold gigabytes and share finished parts, so there is one at a time. The lock is
    // released when the file is closed, also by the end of a killed process.
    fs::create_dir_all(&options.cache)?;
    let lock = fs::File::create(options.cache.join("lock"))?;
    if let Err(TryLockError::WouldBlock) = lock.file().try_lock() {
        report(CompileProgress::Waiting);
        lock.file().lock()?;
    }
    let replace = if options.force { Replace::If(&CompiledManifest::owns) } else { Replace::Never };
    let staged = StagedFolder::create(out, replace)?;
    let mut planned = Vec::with_capacity(artifacts.len());
    for (artifact, name) in artifacts.iter().zip(&steps) {
        artifact.verify()?;
        let parts = parts(artifact, &file_name(artifact, name), options.split)?;
        parts.iter().try_for_each(check_graph)?;
        planned.push(parts);
    }
    let shared = match options.share_weights {
        true => shared_models(&planned)?,
        false => Vec::new(),
    };
    let libraries = Libraries::of(options.library.as_deref())?;
    let count = planned.iter().map(Vec::len).sum();
    let mut number = 0;
    let target = Target::new(options.soc, options.performance);
    let allowed = options.allow.iter().copied().collect();
    let mut manifest = CompiledManifest::new(target, libraries.clone(), allowed);
    let mut finished = Vec::new();
    for ((artifact, name), parts) in artifacts.iter().zip(&steps).zip(&planned) {
        let mut entries = Vec::with_capacity(parts.len());
        for part in parts {
            number += 1;
            let job = PartJob { artifact, part, options, libraries: &libraries };
            let folder = job.folder();
            let done = folder.is_dir();
            report(CompileProgress::Part { name: &part.name, number, count, finished: done });
            if !done {
                job.compile(&folder, report)?;
            }
            entries.push(job.entry(&folder)?);
            finished.push(folder);
        }
        manifest.steps.push(StepEntry {
            name: name.clone(),
            source: artifact.manifest().clone(),
            parts: entries,
            measured: None,
        });
    }
    for (entry, folder) in manifest.steps.iter().flat_map(|step| &step.parts).zip(&finished) {
        for name in [&entry.context, &entry.binary] {
            take(&folder.join(name), &staged.path().join(name))?;
        }
    }
    if !shared.is_empty() {
        let job = SharedJob { models: &shared, planned: &planned, options };
        let folder = job.folder(&finished);
        if !folder.is_dir() {
            job.compile(&folder, report)?;
        }
        manifest.shared = Some(job.entry(&folder, staged.path())?);
        finished.push(folder);
    }
    copy_side_files(&artifacts[0], staged.path())?;
    manifest.files = file_entries(staged.path())?;
    let text = serde_json::to_vec_pretty(&manifest).map_err(std::io::Error::other)?;
    fs::write(staged.path().join(MANIFEST), text)?;
    Compiled::open(staged.path())?;
    let folder = staged.commit()?;
    for part in finished {
        fs::remove_dir_all(part)?;
    }
    Compiled::open(&folder)
}

/// The step's name as it stands in the names of files.
fn file_name(artifact: &Artifact, step: &str) -> String {
    match &artifact.manifest().quantization {
        Some(known) if !known.calibrated => format!("{step}-uncalibrated"),
        _ => step.to_owned(),
    }
}

/// `decode` or `prefill-T` for each artifact.
///
/// # Errors
/// When there is none, they are not steps of the same model whose caches fit each other, or two are
/// the same step.
pub fn step_names(artifacts: &[Artifact]) -> Result<Vec<String>, CompileError> {
    let option = |problem: String| Err(CompileError::Option { option: "ARTIFACT", problem });
    let Some((first, others)) = artifacts.split_first() else {
        return option("at least one is needed".into());
    };
    for other in others {
        let (one, two) = (first.manifest(), other.manifest());
        let mine = (&one.model.checkpoint, one.model.random_seed, &one.options.layers);
        if mine != (&two.model.checkpoint, two.model.random_seed, &two.options.layers)
            || one.step.context != two.step.context
        {
            return option(format!(
                "{} and {} are not steps of the same layers of the same model and context",
                first.folder().display(),
                other.folder().display()
            ));
        }
        if let Some(difference) = difference(one, two) {
            return option(format!(
                "{} and {} do not fit: {difference}; a host takes the caches of one step to the \
                 next as they are",
                first.folder().display(),
                other.folder().display()
            ));
        }
    }
    let mut names: Vec<String> = Vec::new();
    for artifact in artifacts {
        let name = match artifact.manifest().step.tokens {
            1 => "decode".to_owned(),
            tokens => format!("prefill-{tokens}"),
        };
        if names.contains(&name) {
            return option(format!("two of them are {name}"));
        }
        names.push(name);
    }
    Ok(names)
}

/// In what two steps of a model differ so that one cannot go on with the caches of the other.
fn difference(one: &Manifest, two: &Manifest) -> Option<String> {
    fn known<T: Serialize>(manifest: &Manifest, what: fn(&Quantization) -> T) -> Value {
        json!(manifest.quantization.as_ref().map(what))
    }
    let layouts = |manifest: &Manifest| -> Vec<CacheLayout> {
        manifest.step.layers.iter().map(|layer| layer.layout).collect()
    };
    let facts = |manifest: &Manifest| {
        [
            ("the layouts of the caches", json!(layouts(manifest))),
            ("the precision", json!(manifest.options.precision)),
            ("the GELU", json!(manifest.options.gelu)),
            ("the scheme", known(manifest, |known| known.scheme.clone())),
            ("the format of keys and values", known(manifest, |known| known.kv.clone())),
            ("the hash of the ranges", known(manifest, |known| known.ranges_sha256.clone())),
        ]
    };
    for ((what, first), (_, second)) in facts(one).into_iter().zip(facts(two)) {
        if first != second {
            return Some(format!("{what}: {first} in one, {second} in the other"));
        }
    }
    let caches = |manifest: &Manifest| -> BTreeMap<String, Encoding> {
        let is_cache = |role: Role| matches!(role, Role::KeyCache(_) | Role::ValueCache(_));
        let caches = manifest.step.inputs.iter().filter(|tensor| is_cache(tensor.role));
        let port = |tensor: &TensorSpec| {
            let port = manifest.ports().iter().find(|port| port.name == tensor.name)?;
            Some((port.name.clone(), port.encoding))
        };
        caches.filter_map(port).collect()
    };
    let others = caches(two);
    let (name, _) =
        caches(one).into_iter().find(|(name, encoding)| others.get(name) != Some(encoding))?;
    Some(format!("{name} has another scale or zero point"))
}

/// Refuses a graph that cannot become a context before minutes are spent on it.
fn check_graph(part: &Part) -> Result<(), CompileError> {
    let graph = &part.graph;
    let quantized = graph.op_counts().contains_key("QuantizeLinear");
    let wide = graph.nodes().iter().find(|node| {
        !quantized && node.outputs.iter().any(|id| graph.value(*id).dtype == DType::F32)
    });
    if let Some(node) = wide {
        let problem = format!(
            "{}: node {} makes f32 values, which the HTP computes in half precision; export with \
             --precision fp16, or quantize",
            part.name, node.name
        );
        return Err(CompileError::Option { option: "ARTIFACT", problem });
    }
    let bytes = constant_bytes(graph);
    if bytes > SIZE_LIMIT {
        return Err(CompileError::Size {
            part: part.name.clone(),
            what: "the graph's constant data",
            bytes,
            limit: SIZE_LIMIT,
            way: part.smaller(),
        });
    }
    Ok(())
}

/// Bytes of all constants.
pub(crate) fn constant_bytes(graph: &Graph) -> u64 {
    let size = |id| {
        let value = graph.value(id);
        value.dtype.byte_count(&value.shape).unwrap_or(usize::MAX) as u64
    };
    graph.constants().fold(0u64, |sum, (id, _)| sum.saturating_add(size(id)))
}

/// A part and how to compile it.
struct PartJob<'a> {
    artifact: &'a Artifact,
    part: &'a Part,
    options: &'a CompileOptions,
    libraries: &'a Libraries,
}

impl PartJob<'_> {
    /// The folder of the finished part: its name is a hash of everything that the result depends
    /// on. The performance mode is not part of it, because the compiler is not told any.
    fn folder(&self) -> PathBuf {
        let (libraries, soc) = (self.libraries, self.options.soc);
        let texts = [
            CACHE_VERSION,
            &libraries.onnxruntime,
            &libraries.onnxruntime_qnn,
            &libraries.qnn_sdk,
            soc.name,
            &soc.number.to_string(),
            &soc.arch.to_string(),
            &self.part.name,
            &self.part.identity,
        ];
        let data = self.artifact.manifest().data.iter().map(|data| data.xxh3.as_str());
        self.options.cache.join(folder_key(texts.into_iter().chain(data)))
    }

    fn context(&self) -> String {
        format!("{}.onnx", self.part.name)
    }

    /// Compiles into `folder`, which appears complete or not at all.
    fn compile(
        &self,
        folder: &Path,
        report: &mut dyn FnMut(CompileProgress<'_>),
    ) -> Result<(), CompileError> {
        let staged = StagedFolder::create(folder, Replace::Never)?;
        let source = StagedFolder::create(&folder.with_added_extension("source"), Replace::Never)?;
        let model = model_file(self.part, source.path())?;
        let models = [ContextModel { model, context: self.context() }];
        let mut request = self.options.request(&models, CpuNodes::Refused);
        request.account = true;
        let mut heartbeat = |time, memory| report(CompileProgress::Working { time, memory });
        let failed = match compile_contexts(&request, staged.path(), &mut heartbeat) {
            Ok(outcome) => {
                check_size(&self.part.name, staged.path(), &outcome, self.part.smaller())?;
                staged.commit()?;
                report(CompileProgress::Done { time: outcome.time, memory: outcome.peak_memory });
                return Ok(());
            }
            Err(error) => error,
        };
        if !on_cpu(&failed) {
            return Err(failed.into());
        }
        // Which nodes stay on the CPU shows when they may.
        drop(staged);
        let staged = StagedFolder::create(folder, Replace::Never)?;
        request.cpu_nodes = CpuNodes::Kept;
        let Ok(outcome) = compile_contexts(&request, staged.path(), &mut heartbeat) else {
            return Err(failed.into());
        };
        let audit = self.audit(staged.path(), &outcome.graphs, None, Placement::Mixed)?;
        if audit.qnn_ops.is_empty() || audit.findings.is_empty() {
            return Err(failed.into());
        }
        Err(CompileError::Findings { part: self.part.name.clone(), findings: audit.findings })
    }

    fn audit(
        &self,
        folder: &Path,
        graphs: &[String],
        schematic: Option<Schematic>,
        placement: Placement,
    ) -> Result<Audit, CompileError> {
        let mut dump = Dump::default();
        for graph in graphs {
            let json = fs::read(folder.join(graph))?;
            dump.extend(Dump::parse(&json).map_err(|source| self.unreadable(source))?);
        }
        Ok(audit(&self.part.graph, &dump, schematic, placement))
    }

    fn unreadable(&self, source: firesteel_check::audit::AuditError) -> CompileError {
        CompileError::Audit { part: self.part.name.clone(), source }
    }

    /// The entry of a finished part.
    ///
    /// # Errors
    /// When the audit finds something that is not allowed.
    fn entry(&self, folder: &Path) -> Result<PartEntry, CompileError> {
        let names = names(folder)?;
        let ending = |end: &str| names.iter().find(|name| name.ends_with(end)).cloned();
        let missing = |what: &str| CompileError::Content {
            file: folder.to_owned(),
            problem: format!("has no {what}; remove it and compile again"),
        };
        let binary = ending(BINARY).ok_or_else(|| missing("binary"))?;
        let schematic = ending("_schematic.bin").ok_or_else(|| missing("schematic"))?;
        let graphs: Vec<String> = names.iter().filter(|name| is_dump(name)).cloned().collect();
        let text = fs::read(folder.join(schematic))?;
        let schematic = Schematic::parse(&String::from_utf8_lossy(&text))
            .map_err(|source| self.unreadable(source))?;
        let mut audit = self.audit(folder, &graphs, Some(schematic), Placement::Htp)?;
        let bytes = MappedFile::open(&folder.join(&binary))?.bytes();
        audit.findings.extend(wrong_target(&binary, &bytes, self.options.soc));
        self.options.refuse(&self.part.name, &audit.findings)?;
        Ok(PartEntry {
            name: self.part.name.clone(),
            role: self.part.role.clone(),
            ports: self.part.ports.clone(),
            context: self.context(),
            binary_bytes: bytes.len() as u64,
            binary,
            graphs: graphs
                .iter()
                .map(|file| file.trim_start_matches("QNN_").trim_end_matches(".json").to_owned())
                .collect(),
            constant_bytes: constant_bytes(&self.part.graph),
            audit,
        })
    }
}

/// The name of a folder of the cache: a hash of the texts that tell what is in it, none of which
/// contains a zero byte.
fn folder_key<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let ended = |text: &'a str| text.bytes().chain([0]);
    sha256(&texts.into_iter().flat_map(ended).collect::<Vec<u8>>())
}

/// Refuses anything but one binary of a size that a session takes.
fn check_size(
    part: &str,
    folder: &Path,
    outcome: &CompileOutcome,
    way: &'static str,
) -> Result<(), CompileError> {
    let [binary] = &outcome.binaries[..] else {
        let problem = format!("{} binaries were written instead of one", outcome.binaries.len());
        return Err(CompileError::Content { file: folder.to_owned(), problem });
    };
    let bytes = fs::metadata(folder.join(binary))?.len();
    if bytes > SIZE_LIMIT {
        let (part, what) = (part.to_owned(), "the context binary");
        return Err(CompileError::Size { part, what, bytes, limit: SIZE_LIMIT, way });
    }
    Ok(())
}

impl CompileOptions {
    /// The findings that are not allowed, as an error.
    fn refuse(&self, part: &str, findings: &[Finding]) -> Result<(), CompileError> {
        let refused: Vec<Finding> =
            findings.iter().filter(|found| !self.allow.contains(&found.rule)).cloned().collect();
        if refused.is_empty() {
            return Ok(());
        }
        Err(CompileError::Findings { part: part.to_owned(), findings: refused })
    }

    fn request<'a>(
        &'a self,
        models: &'a [ContextModel],
        cpu_nodes: CpuNodes,
    ) -> CompileRequest<'a> {
        CompileRequest {
            models,
            soc: self.soc,
            account: false,
            cpu_nodes,
            library: self.library.clone(),
            worker: &self.worker,
            limits: self.limits,
        }
    }
}

/// Whether a compilation failed because nodes would stay on the CPU.
fn on_cpu(error: &OrtError) -> bool {
    let OrtError::Child { diagnoses, .. } = error else { return false };
    // A back end that does not start leaves all nodes on the CPU, which says nothing about them.
    diagnoses.first().is_some_and(|diagnosis| diagnosis.code == "CPU placement")
}

/// The finding that a binary does not say that it is for `soc`. It carries its compile
/// configuration as text.
fn wrong_target(binary: &str, bytes: &[u8], soc: Soc) -> Option<Finding> {
    const MARK: &[u8] = b"soc_type=";
    let meant = format!("soc_type={};arch={};", soc.name.to_uppercase(), soc.arch);
    let start = bytes.windows(MARK.len()).position(|window| window == MARK);
    let text = start.and_then(|start| bytes.get(start..)).unwrap_or_default();
    if text.starts_with(meant.as_bytes()) {
        return None;
    }
    let found: String = text.iter().take(meant.len()).map(|byte| char::from(*byte)).collect();
    let detail = format!("says {found:?}, meant is {meant:?}");
    Some(Finding { rule: Rule::Target, node: binary.to_owned(), detail })
}

/// The model file of a part: that of the artifact, or one written to `folder`.
fn model_file(part: &Part, folder: &Path) -> Result<PathBuf, CompileError> {
    if let Some(model) = &part.model {
        return Ok(model.clone());
    }
    let name = format!("{}.onnx", part.name);
    let file = ModelFile {
        data_file: format!("{name}.data"),
        name: name.clone(),
        graph: &part.graph,
        opset: firesteel_onnx::MAX_OPSET,
        producer_version: env!("CARGO_PKG_VERSION").into(),
        metadata: Vec::new(),
    };
    WritePlan::new(vec![file], Vec::new())?.write(folder, 2, &|_| {})?;
    Ok(folder.join(name))
}

/// The models of steps that can share a binary.
///
/// # Errors
/// When there is only one, or one is cut into parts.
fn shared_models(planned: &[Vec<Part>]) -> Result<Vec<ContextModel>, CompileError> {
    let option = |problem: &str| CompileError::Option {
        option: "--share-weights",
        problem: problem.to_owned(),
    };
    if planned.len() < 2 {
        return Err(option("needs two steps, such as a decode and a prefill artifact"));
    }
    let mut models = Vec::new();
    for parts in planned {
        let [part] = &parts[..] else {
            return Err(option("goes with steps of one part (--split 1, no head shards)"));
        };
        let model = part.model.clone().ok_or_else(|| option("goes with --split 1"))?;
        models.push(ContextModel { model, context: format!("shared-{}.onnx", part.name) });
    }
    Ok(models)
}

/// The steps once more, in one binary. The emulator cannot load it, so what is checked are the
/// binaries of their own; that it was made of the same operators is audited.
struct SharedJob<'a> {
    models: &'a [ContextModel],
    planned: &'a [Vec<Part>],
    options: &'a CompileOptions,
}

impl SharedJob<'_> {
    /// The folder of the finished binary, named after the `finished` parts that are in it.
    fn folder(&self, finished: &[PathBuf]) -> PathBuf {
        let names = finished.iter().filter_map(|part| part.file_name()?.to_str());
        self.options.cache.join(format!("shared-{}", folder_key(names)))
    }

    fn compile(
        &self,
        folder: &Path,
        report: &mut dyn FnMut(CompileProgress<'_>),
    ) -> Result<(), CompileError> {
        let staged = StagedFolder::create(folder, Replace::Never)?;
        report(CompileProgress::Part { name: SHARED, number: 1, count: 1, finished: false });
        let mut request = self.options.request(self.models, CpuNodes::Refused);
        request.account = true;
        let outcome = compile_contexts(&request, staged.path(), &mut |time, memory| {
            report(CompileProgress::Working { time, memory });
        })?;
        let way = "compile the steps without --share-weights, or fewer layers at once";
        check_size(SHARED, staged.path(), &outcome, way)?;
        report(CompileProgress::Done { time: outcome.time, memory: outcome.peak_memory });
        staged.commit()?;
        Ok(())
    }

    /// Takes the finished binary to `out`.
    ///
    /// # Errors
    /// When it is for another chip, or a step has other operators in it than were meant.
    fn entry(&self, folder: &Path, out: &Path) -> Result<SharedEntry, CompileError> {
        let names = names(folder)?;
        let binary = names.iter().find(|name| name.ends_with(BINARY)).cloned();
        let binary = binary.ok_or_else(|| CompileError::Content {
            file: folder.to_owned(),
            problem: "has no binary; remove it and compile again".into(),
        })?;
        let bytes = MappedFile::open(&folder.join(&binary))?.bytes();
        let mut findings: Vec<Finding> =
            wrong_target(&binary, &bytes, self.options.soc).into_iter().collect();
        let mut dumps = Vec::new();
        for graph in names.iter().filter(|name| is_dump(name)) {
            let unreadable = |source| CompileError::Audit { part: SHARED.into(), source };
            dumps.push(Dump::parse(&fs::read(folder.join(graph))?).map_err(unreadable)?);
        }
        for part in self.planned.iter().flatten() {
            // Which list is whose, nothing says but its content.
            let audits = dumps.iter().map(|dump| audit(&part.graph, dump, None, Placement::Htp));
            let nearest = audits.min_by_key(|audit| audit.findings.len());
            let nearest = nearest.ok_or_else(|| CompileError::Content {
                file: folder.to_owned(),
                problem: "has no list of operators; remove it and compile again".into(),
            })?;
            findings.extend(nearest.findings);
        }
        self.options.refuse(SHARED, &findings)?;
        take(&folder.join(&binary), &out.join(&binary))?;
        let mut contexts = Vec::new();
        for (model, part) in self.models.iter().zip(self.planned.iter().flatten()) {
            take(&folder.join(&model.context), &out.join(&model.context))?;
            contexts.push((part.name.clone(), model.context.clone()));
        }
        Ok(SharedEntry { contexts, binary, bytes: bytes.len() as u64 })
    }
}

/// Name of the binary of several steps in messages.
const SHARED: &str = "shared";

/// How the names of binaries end.
const BINARY: &str = "_qnn.bin";

/// Whether a file is the list of operators that QNN got.
fn is_dump(name: &str) -> bool {
    name.starts_with("QNN_") && name.ends_with(".json") && !name.ends_with("_tensor_log.json")
}

/// Copies a file, by a link where the file system has them.
fn take(from: &Path, to: &Path) -> Result<(), CompileError> {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to)?;
    }
    Ok(())
}

/// Copies what a host needs besides the binaries.
fn copy_side_files(artifact: &Artifact, out: &Path) -> Result<(), CompileError> {
    let manifest = artifact.manifest();
    let mut names: Vec<&str> = manifest.copied.iter().map(|file| file.name.as_str()).collect();
    if let Some(EmbeddingEntry::File { file, .. }) = &manifest.embedding {
        names.push(file);
    }
    for name in names {
        fs::copy(artifact.folder().join(name), out.join(name))?;
    }
    Ok(())
}

fn file_entries(folder: &Path) -> Result<Vec<FileEntry>, CompileError> {
    let entry = |name: String| {
        let (bytes, xxh3) = xxh3(&folder.join(&name))?;
        Ok(FileEntry { name, bytes, xxh3 })
    };
    names(folder)?.into_iter().map(entry).collect()
}

/// Names of the entries of a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>, CompileError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binary_says_for_whom_it_is() {
        let soc = Soc::find("sm8750").unwrap();
        for (text, right) in [
            ("\0x;soc_type=SM8750;arch=79;vtcm_size=1", true),
            ("soc_type=SM8550;arch=73;", false),
            ("soc_type=SM8750;arch=73;", false),
            ("soc_type=SM8750;arch=7", false),
            ("", false),
        ] {
            let finding = wrong_target("b.bin", text.as_bytes(), soc);
            assert_eq!(finding.is_none(), right, "{text}: {finding:?}");
        }
    }
}
