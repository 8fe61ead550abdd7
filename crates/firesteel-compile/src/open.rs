use crate::chain::Chain;
use crate::{CompileError, CompiledManifest, Libraries, Measured, PartEntry, StepEntry};
use firesteel_artifact::{
    ArtifactEmbedding, EmbeddingEntry, HeadRunner, MANIFEST, ShardedRunner, xxh3,
};
use firesteel_checkpoint::{MappedFile, StagedFile, file_in};
use firesteel_ort::OrtRunner;
use firesteel_ort::qnn::{HtpModel, HtpOptions};
use firesteel_step::{EncodedRunner, Runner, RunnerError};
use firesteel_tensor::{Tensor, TensorView};
use fs_err as fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A compiled artifact on disk.
#[derive(Debug, Clone)]
pub struct Compiled {
    folder: PathBuf,
    manifest: CompiledManifest,
}

impl Compiled {
    /// Opens a folder: reads the manifest and compares the files' lengths with it; of their
    /// contents see [`Compiled::verify`].
    ///
    /// # Errors
    /// When the manifest is not understood, or a file is missing or of another length.
    pub fn open(folder: &Path) -> Result<Self, CompileError> {
        let manifest = CompiledManifest::read(folder)?;
        for entry in &manifest.files {
            let file = folder.join(&entry.name);
            let found = file_in(folder, &entry.name)?;
            let bytes = fs::metadata(found.as_deref().unwrap_or(&file))?.len();
            if bytes != entry.bytes {
                let problem = format!("has {bytes} bytes, the manifest has {}", entry.bytes);
                return Err(CompileError::Content { file, problem });
            }
        }
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    /// Reads every file and compares it with its hash in the manifest.
    ///
    /// # Errors
    /// The first file that is not what was written.
    pub fn verify(&self) -> Result<(), CompileError> {
        for entry in &self.manifest.files {
            let file = self.folder.join(&entry.name);
            let (_, actual) = xxh3(&file)?;
            if actual != entry.xxh3 {
                let problem = format!(
                    "is damaged: XXH3 is {actual}, the manifest has {}; compile it again",
                    entry.xxh3
                );
                return Err(CompileError::Content { file, problem });
            }
        }
        Ok(())
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest.
    pub fn manifest(&self) -> &CompiledManifest {
        &self.manifest
    }

    /// Writes what was measured of the step `name` into the manifest, beside what others have
    /// written there since it was opened.
    ///
    /// # Errors
    /// When there is no such step, another artifact is there by now, or the manifest cannot be
    /// written.
    pub fn record(&mut self, name: &str, measured: Measured) -> Result<(), CompileError> {
        self.step(Some(name))?;
        let now = CompiledManifest::read(&self.folder)?;
        for (step, now) in self.manifest.steps.iter_mut().zip(&now.steps) {
            step.measured.clone_from(&now.measured);
        }
        if self.manifest != now {
            let problem = "is of another artifact than the one that was measured, so the result \
                           is not recorded; check this one";
            let (file, problem) = (self.folder.join(MANIFEST), problem.into());
            return Err(CompileError::Content { file, problem });
        }
        for step in self.manifest.steps.iter_mut().filter(|step| step.name == name) {
            step.measured = Some(measured.clone());
        }
        let text = serde_json::to_vec_pretty(&self.manifest).map_err(io::Error::other)?;
        let staged = StagedFile::create(&self.folder.join(MANIFEST), Some(|_| Ok(true)))?;
        staged.file().write_all(&text)?;
        Ok(staged.commit()?)
    }

    /// The step of that name, or the first.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn step(&self, name: Option<&str>) -> Result<&StepEntry, CompileError> {
        let steps = &self.manifest.steps;
        let found = match name {
            Some(name) => steps.iter().find(|step| step.name == name),
            None => steps.first(),
        };
        found.ok_or_else(|| {
            let names: Vec<&str> = steps.iter().map(|step| step.name.as_str()).collect();
            CompileError::Option {
                option: "--graphs",
                problem: format!("{} has {}", self.folder.display(), names.join(", ")),
            }
        })
    }

    /// A step on the emulator, its parts chained, each in a child process of its own.
    ///
    /// # Errors
    /// When other versions of the libraries are installed than made it, or a part does not load.
    pub fn emulator(
        &self,
        step: &StepEntry,
        options: &HtpOptions,
    ) -> Result<Box<dyn Runner>, CompileError> {
        let differences =
            self.manifest.libraries.differences(&Libraries::of(options.library.as_deref())?);
        if !differences.is_empty() {
            let problem = format!(
                "was compiled with other versions: {}; compile it again",
                differences.join(", ")
            );
            return Err(CompileError::Manifest { file: self.folder.join(MANIFEST), problem });
        }
        let open = |context: &str| HtpModel::open(&self.folder.join(context), options);
        let mut slices: Vec<Box<dyn Runner>> = Vec::new();
        for (part, spec) in step.slices() {
            let raw = spec.clone().with_encodings(&part.ports);
            let runner = Box::new(OrtRunner::on_htp(open(&part.context)?, raw)?);
            slices.push(if part.ports.is_empty() {
                runner
            } else {
                Box::new(EncodedRunner::new(runner, spec.clone(), &part.ports)?)
            });
        }
        let mut heads: Vec<HeadRunner> = Vec::new();
        for part in step.heads() {
            heads.push(head(open(&part.context)?, part)?);
        }
        let layers: Box<dyn Runner> = match slices.pop() {
            Some(only) if slices.is_empty() => only,
            last => {
                slices.extend(last);
                Box::new(Chain::new(slices, &step.source.step)?)
            }
        };
        if heads.is_empty() {
            return Ok(layers);
        }
        Ok(Box::new(ShardedRunner::new(layers, heads, step.source.options.logits)?))
    }

    /// The embedding table, where the folder holds it.
    ///
    /// # Errors
    /// When the table is not what the manifest says.
    pub fn embedding(&self) -> Result<Option<ArtifactEmbedding>, CompileError> {
        let Some(EmbeddingEntry::File { file, dtype, shape }) =
            self.manifest.steps.first().and_then(|step| step.source.embedding.as_ref())
        else {
            return Ok(None);
        };
        let path = self.folder.join(file);
        let bytes = MappedFile::open(&path)?.bytes();
        let table = Tensor::new(*dtype, shape.to_vec(), bytes)
            .map_err(|error| error.to_string())
            .and_then(ArtifactEmbedding::new)
            .map_err(|problem| CompileError::Content { file: path, problem })?;
        Ok(Some(table))
    }
}

/// A part of the head on the emulator.
fn head(mut model: HtpModel, part: &PartEntry) -> Result<HeadRunner, CompileError> {
    let encoding =
        |name: &str| part.ports.iter().find(|port| port.name == name).map(|port| port.encoding);
    let (input, output) = (encoding("hidden"), encoding("logits"));
    for encoding in [input, output].into_iter().flatten() {
        encoding.validate()?;
    }
    Ok(Box::new(move |hidden: TensorView<'_>| {
        let fail = |message: String| RunnerError::Failed { runner: "htp".into(), message };
        let encoded = input.map(|encoding| encoding.quantize(hidden)).transpose()?;
        let hidden = encoded.as_ref().map_or(hidden, Tensor::view);
        let outputs = model.run(&[("hidden", hidden)]).map_err(|error| fail(error.to_string()))?;
        let logits = outputs.into_iter().next();
        let logits = logits.ok_or_else(|| fail("a part of the head has no output".into()))?;
        Ok(match output {
            Some(encoding) => encoding.dequantize(logits.view())?,
            None => logits,
        })
    }))
}
