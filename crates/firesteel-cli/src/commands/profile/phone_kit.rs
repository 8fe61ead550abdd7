use crate::commands::check::{CheckArgs, default_bar, feed, token_ids};
use crate::kit::{KIT, Kit, KitPart, KitTensor, MAX_STEPS, Meaning, step_folder};
use crate::printer::{Printer, mebibytes};
use crate::source::{self, OrtArgs};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::GraphRole;
use firesteel_checkpoint::{Replace, StagedFolder};
use firesteel_compile::PartRole;
use firesteel_model::{Model, RunnerKind};
use firesteel_step::{
    KvState, Logits, PortEncoding, Role, StepInputs, StepOutputs, StepSpec, TensorSpec,
};
use firesteel_tensor::DType;
use fs_err as fs;
use serde::Serialize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write what is needed to run an artifact on a device, without this program.
///
/// The folder has the ONNX files or the context binaries, the raw inputs of a few steps, the outputs
/// that are expected, input lists, a script for adb and a README. The inputs of every step are those
/// of the reference, whatever the device computed before. `firesteel check outputs KIT DIR`
/// compares what comes back, `firesteel profile import` reads the times. The folder appears complete
/// or not at all; models are hard links where the file system has them.
#[derive(Debug, Args)]
pub(crate) struct PhoneKit {
    /// Artifact or compiled artifact
    path: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Steps, from an empty cache on
    #[arg(long, value_name = "N", default_value_t = 4)]
    steps: usize,
    /// Token ids to run [default: those of a text that is built in]
    #[arg(long, value_name = "ID,ID,…", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// The model's checkpoint, whose outputs in f64 are expected
    #[arg(long, value_name = "CHECKPOINT")]
    against: Option<PathBuf>,
    /// Whose outputs are expected: those of the checkpoint, or those of the artifact itself, on the
    /// evaluator or if it is compiled on the emulator [default: the checkpoint's where one is given]
    #[arg(long, value_enum)]
    expect: Option<Expect>,
    /// The step of a compiled artifact: decode, prefill-T [default: its first]
    #[arg(long, value_name = "NAME")]
    graph: Option<String>,
    #[command(flatten)]
    ort: OrtArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Expect {
    /// How far the device is from the model
    Checkpoint,
    /// How far the device is from what the artifact writes down
    Artifact,
}

/// What a graph of the kit is.
struct Part {
    name: String,
    /// Files in the source's folder, the ONNX file first.
    files: Vec<String>,
    binary: Option<String>,
    work: Work,
    ports: Vec<PortEncoding>,
}

/// What a graph does.
enum Work {
    /// Layers of the step, the first of them counted within it.
    Layers { spec: Box<StepSpec>, first: usize },
    /// Rows of the head, and the name of the output.
    Head { rows: Range<usize>, output: String },
}

/// The kit and its size.
#[derive(Debug, Serialize)]
struct Outcome<'a> {
    out: &'a Path,
    tensor_bytes: u64,
    kit: &'a Kit,
}

impl PhoneKit {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let mut source = source::open(&self.path, printer)?;
        if let Some(name) = &self.graph {
            let Model::Compiled(step) = &mut source else {
                bail!("--graph goes with a compiled artifact");
            };
            step.step.clone_from(&step.compiled.step(Some(name))?.name);
        }
        source.verify()?;
        let (folder, contract, parts) = parts(&source, &self.path)?;
        let count = self.steps.checked_mul(contract.tokens);
        let count = count.filter(|count| *count > 0 && *count <= contract.context);
        let Some(count) = count.filter(|_| self.steps <= MAX_STEPS) else {
            bail!(
                "--steps {}: 1 to {} steps of {} tokens fit in the context of {}",
                self.steps,
                (contract.context / contract.tokens.max(1)).min(MAX_STEPS),
                contract.tokens,
                contract.context
            );
        };
        let against =
            self.against.as_deref().map(|path| source::open(path, printer)).transpose()?;
        // A checkpoint has the embedding, whoever computes what is expected.
        let model = against.as_ref().unwrap_or(&source);
        let reference = match self.expect {
            Some(Expect::Artifact) => &source,
            Some(Expect::Checkpoint) if against.is_none() => {
                bail!("--expect checkpoint: --against names the checkpoint")
            }
            _ => model,
        };
        let kind = reference.default_runner(false);
        let spec = StepSpec { dtype: DType::F32, ..contract.clone() };
        let spec = spec.with_tokens(contract.tokens)?;
        // What enters a part is what the layers before it return.
        let layers = parts.len() > 1;
        let mut runner = reference.runner(kind, Some(&spec), layers, &self.ort.options()?)?;
        let mut feed = feed(&spec, model, &source)?;
        let wanted = CheckArgs::of_tokens(self.ids.clone(), count);
        let mut ids = token_ids(&wanted, &source, model, &spec)?;
        if ids.len() < count || (self.ids.is_some() && ids.len() > count) {
            bail!(
                "{} steps of {} tokens take {count}, and there are {}; give as many --ids",
                self.steps,
                contract.tokens,
                ids.len()
            );
        }
        ids.truncate(count);

        let mut kit = Kit::new(parts.iter().map(|part| part.described(&contract)).collect());
        kit.soc = match &source {
            Model::Compiled(step) => Some(step.compiled.manifest().target.soc.clone()),
            _ => None,
        };
        kit.reference = runner.name().to_owned();
        kit.tokens = contract.tokens;
        kit.steps = self.steps;
        kit.vocab_size = contract.vocab_size;
        kit.all_logits = contract.logits == Logits::All;
        kit.min_snr = default_bar([&source, reference], [RunnerKind::Ort, kind]);
        kit.validate()?;
        let tensor_bytes = tensor_bytes(&kit)?;

        let staged = StagedFolder::create(&self.out, Replace::Never)?;
        staged.require_space(tensor_bytes)?;
        let root = staged.path();
        write_models(&folder, &root.join("models"), &parts)?;
        let run = runner.spec().clone();
        let mut state = KvState::new(&run)?;
        for (step, ids) in ids.chunks(contract.tokens).enumerate() {
            let prepared = state.prepare(&run, &feed.rows(ids)?)?;
            let inputs = state.inputs(&run, &prepared)?;
            let outputs = runner.step(&inputs)?;
            let values = Values { spec: &run, inputs: &inputs, outputs: &outputs };
            for (part, described) in parts.iter().zip(&kit.parts) {
                values.write(part, described, step, &root.join(&part.name))?;
            }
            state.commit(&run, prepared, &outputs)?;
        }
        for part in &kit.parts {
            fs::write(root.join(&part.name).join("input_list.txt"), input_list(part, self.steps))?;
        }
        kit.ids = ids;
        fs::write(root.join(KIT), serde_json::to_string_pretty(&kit)? + "\n")?;
        fs::write(root.join("README.md"), readme(&kit))?;
        let script = root.join("run.sh");
        fs::write(&script, run_script(&kit, &source))?;
        #[cfg(unix)]
        fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        staged.commit()?;

        if self.json {
            printer.json(&Outcome { out: &self.out, tensor_bytes, kit: &kit })?;
        } else {
            printer.line(format!("wrote {}", self.out.display()))?;
            let names: Vec<&str> = kit.parts.iter().map(|part| part.name.as_str()).collect();
            printer.line(format!(
                "{} steps of {} tokens on {}, {} of inputs and expected outputs; expected is what {} \
                 computes",
                kit.steps,
                kit.tokens,
                names.join(", "),
                mebibytes(tensor_bytes),
                kit.reference
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The source's folder, its contract and its graphs in the order in which they run.
fn parts(source: &Model, path: &Path) -> anyhow::Result<(PathBuf, StepSpec, Vec<Part>)> {
    match source {
        Model::Checkpoint(_) => bail!(
            "{} is a checkpoint; a device runs what `firesteel export` or `firesteel compile` made \
             of it",
            path.display()
        ),
        Model::Artifact(artifact) => {
            let manifest = artifact.manifest();
            let data: Vec<String> = manifest.data.iter().map(|data| data.file.clone()).collect();
            let stem = |file: &str| file.trim_end_matches(".onnx").to_owned();
            let parts = manifest.graphs.iter().enumerate().map(|(number, graph)| Part {
                name: stem(&graph.file),
                files: [vec![graph.file.clone()], data.clone()].concat(),
                binary: None,
                work: match &graph.role {
                    GraphRole::Step => {
                        Work::Layers { spec: Box::new(manifest.step.clone()), first: 0 }
                    }
                    // The step is graph 0, and shards of the head are numbered from 0 on.
                    GraphRole::Head { rows } => Work::Head {
                        rows: rows.clone(),
                        output: format!("logits_{}", number.saturating_sub(1)),
                    },
                },
                ports: manifest.ports().to_vec(),
            });
            Ok((artifact.folder().to_owned(), manifest.contract()?, parts.collect()))
        }
        Model::Compiled(step) => {
            let entry = step.entry()?;
            let whole = entry.source.step.first_layer;
            // A head that was cut off by the compilation keeps its name.
            let sharded = entry.source.graphs.len() > 1;
            let mut shards = 0..;
            let mut parts = Vec::new();
            for part in &entry.parts {
                let work = match &part.role {
                    PartRole::Layers { step } => Work::Layers {
                        spec: step.clone(),
                        first: step.first_layer.saturating_sub(whole),
                    },
                    PartRole::Head { rows } => {
                        let number = shards.next().unwrap_or(0);
                        let output =
                            if sharded { format!("logits_{number}") } else { "logits".into() };
                        Work::Head { rows: rows.clone(), output }
                    }
                };
                parts.push(Part {
                    name: part.name.clone(),
                    files: vec![part.context.clone(), part.binary.clone()],
                    binary: Some(part.binary.clone()),
                    work,
                    ports: part.ports.clone(),
                });
            }
            let has_heads = entry.parts.iter().any(|p| matches!(p.role, PartRole::Head { .. }));
            let contract = match has_heads {
                true => entry.source.step.with_logits(entry.source.options.logits)?,
                false => entry.source.step.clone(),
            };
            Ok((step.compiled.folder().to_owned(), contract, parts))
        }
    }
}

impl Part {
    /// The part as the kit describes it; `contract` is the whole step's.
    fn described(&self, contract: &StepSpec) -> KitPart {
        let tensor = |name: &str, dtype: DType, shape: &[usize], meaning: Meaning| {
            let encoding = self.ports.iter().find(|p| p.name == name).map(|port| port.encoding);
            KitTensor {
                name: name.to_owned(),
                dtype: encoding.map_or(dtype, |encoding| encoding.dtype),
                shape: shape.to_vec(),
                encoding,
                meaning,
            }
        };
        let of = |spec: &TensorSpec| {
            let meaning = match spec.role {
                Role::Logits => Meaning::Logits,
                Role::Hidden | Role::LayerHidden(_) => Meaning::Hidden,
                Role::KeyNew(_) | Role::ValueNew(_) => Meaning::Entry,
                _ => Meaning::Input,
            };
            tensor(&spec.name, spec.dtype, &spec.shape, meaning)
        };
        let (inputs, outputs, first_row) = match &self.work {
            Work::Layers { spec, .. } => {
                (spec.inputs.iter().map(of).collect(), spec.outputs.iter().map(of).collect(), None)
            }
            Work::Head { rows, output } => {
                let StepSpec { tokens, hidden_size, dtype, .. } = *contract;
                let logits = match contract.logits {
                    Logits::All => vec![1, tokens, rows.len()],
                    _ => vec![1, rows.len()],
                };
                let hidden = [1, tokens, hidden_size];
                (
                    vec![tensor("hidden", dtype, &hidden, Meaning::Input)],
                    vec![tensor(output, dtype, &logits, Meaning::Logits)],
                    Some(rows.start),
                )
            }
        };
        KitPart {
            name: self.name.clone(),
            model: self.files.first().cloned().unwrap_or_default(),
            binary: self.binary.clone(),
            first_row,
            inputs,
            outputs,
        }
    }
}

/// Bytes of all inputs and expected outputs.
fn tensor_bytes(kit: &Kit) -> anyhow::Result<u64> {
    let mut step = 0u64;
    for part in &kit.parts {
        for tensor in &part.inputs {
            step = step.saturating_add(tensor.bytes(tensor.dtype)? as u64);
        }
        for tensor in &part.outputs {
            step = step.saturating_add(tensor.bytes(DType::F32)? as u64);
        }
    }
    Ok(step.saturating_mul(kit.steps as u64))
}

/// Links the graphs' files, or copies them where that is not possible.
fn write_models(from: &Path, to: &Path, parts: &[Part]) -> anyhow::Result<()> {
    fs::create_dir(to)?;
    for file in parts.iter().flat_map(|part| &part.files) {
        let (source, target) = (from.join(file), to.join(file));
        if !target.exists() && fs::hard_link(&source, &target).is_err() {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}

/// The tensors of a step of the reference.
struct Values<'a> {
    spec: &'a StepSpec,
    inputs: &'a StepInputs<'a>,
    outputs: &'a StepOutputs,
}

impl Values<'_> {
    fn input(&self, role: Role) -> anyhow::Result<Vec<f32>> {
        let view = self.inputs.get(self.spec, role);
        let view = view.with_context(|| format!("the reference has no input {role:?}"))?;
        Ok(view.to_f32()?.into_owned())
    }

    fn output(&self, role: Role) -> anyhow::Result<Vec<f32>> {
        let tensor = self.outputs.get(self.spec, role).with_context(|| {
            format!(
                "the reference returns no {role:?}, which goes from one graph to the next; give the \
                 checkpoint with --against, and expect what it computes (--expect checkpoint)"
            )
        })?;
        Ok(tensor.view().to_f32()?.into_owned())
    }

    /// The residual stream after `count` layers.
    fn hidden(&self, count: usize) -> anyhow::Result<Vec<f32>> {
        match count.checked_sub(1) {
            None => self.input(Role::Embedding),
            Some(last) if count == self.spec.layers.len() => {
                let whole = self.outputs.get(self.spec, Role::Hidden).is_some();
                self.output(if whole { Role::Hidden } else { Role::LayerHidden(last) })
            }
            Some(last) => self.output(Role::LayerHidden(last)),
        }
    }

    /// Writes the files of one part in one step.
    fn write(
        &self,
        part: &Part,
        described: &KitPart,
        step: usize,
        folder: &Path,
    ) -> anyhow::Result<()> {
        let [inputs, expected] = ["inputs", "expected"].map(|kind| {
            let folder = folder.join(kind).join(step_folder(step));
            fs::create_dir_all(&folder).map(|()| folder)
        });
        let (inputs, expected) = (inputs?, expected?);
        let (mut ins, mut outs) = (Vec::new(), Vec::new());
        match &part.work {
            Work::Layers { spec, first } => {
                for tensor in &spec.inputs {
                    ins.push(match tensor.role {
                        Role::Embedding => self.hidden(*first)?,
                        Role::KeyCache(i) => self.input(Role::KeyCache(first + i))?,
                        Role::ValueCache(i) => self.input(Role::ValueCache(first + i))?,
                        role => self.input(role)?,
                    });
                }
                for tensor in &spec.outputs {
                    outs.push(match tensor.role {
                        Role::KeyNew(i) => self.output(Role::KeyNew(first + i))?,
                        Role::ValueNew(i) => self.output(Role::ValueNew(first + i))?,
                        Role::Hidden => self.hidden(first + spec.layers.len())?,
                        role => self.output(role)?,
                    });
                }
            }
            Work::Head { rows, .. } => {
                ins.push(self.hidden(self.spec.layers.len())?);
                let logits = self.output(Role::Logits)?;
                let tokens = logits.chunks_exact(self.spec.vocab_size);
                let own = tokens.map(|row| row.get(rows.clone()).unwrap_or_default());
                outs.push(own.flatten().copied().collect());
            }
        }
        let file = |tensor: &KitTensor| format!("{}.raw", tensor.name);
        for (tensor, values) in described.inputs.iter().zip(&ins) {
            fs::write(inputs.join(file(tensor)), tensor.encode(values)?.bytes())?;
        }
        for (tensor, values) in described.outputs.iter().zip(&outs) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            if bytes.len() != tensor.bytes(DType::F32)? {
                bail!("{}: the reference returns {} values", tensor.name, values.len());
            }
            fs::write(expected.join(file(tensor)), bytes)?;
        }
        Ok(())
    }
}

/// The inputs of every step, a line each, as `qnn-net-run` reads them.
fn input_list(part: &KitPart, steps: usize) -> String {
    let mut text = String::new();
    for step in 0..steps {
        let folder = format!("{}/inputs/{}", part.name, step_folder(step));
        let files: Vec<String> = part
            .inputs
            .iter()
            .map(|tensor| format!("{name}:={folder}/{name}.raw", name = tensor.name))
            .collect();
        text.push_str(&files.join(" "));
        text.push('\n');
    }
    text
}

/// The script for adb. Everything in it that depends on the kit is a bare name.
fn run_script(kit: &Kit, source: &Model) -> String {
    let list = |of: fn(&KitPart) -> &str| {
        let names: Vec<String> = kit.parts.iter().map(|part| format!("'{}'", of(part))).collect();
        names.join(" ")
    };
    let arch = match source {
        Model::Compiled(step) => step.compiled.manifest().target.arch.to_string(),
        _ => String::new(),
    };
    include_str!("phone_kit.sh")
        .replace("@PARTS@", &list(|part| &part.name))
        .replace("@MODELS@", &list(|part| &part.model))
        .replace("@BINARIES@", &list(|part| part.binary.as_deref().unwrap_or_default()))
        .replace("@ARCH@", &arch)
}

fn readme(kit: &Kit) -> String {
    let parts: Vec<String> = kit
        .parts
        .iter()
        .map(|part| {
            let file = part.binary.as_ref().unwrap_or(&part.model);
            format!(
                "| {} | models/{file} | {} | {} |",
                part.name,
                part.inputs.len(),
                part.outputs.len()
            )
        })
        .collect();
    let target = match &kit.soc {
        Some(soc) => format!("The graphs are compiled for {soc} and run on no other chip."),
        None => "The graphs are ONNX files: ONNX Runtime runs them anywhere, and `qnn-net-run` does \
                 not read them. For outputs from the NPU compile the artifact and make a kit of that."
            .into(),
    };
    include_str!("phone_kit.md")
        .replace("@TARGET@", &target)
        .replace("@STEPS@", &kit.steps.to_string())
        .replace("@TOKENS@", &kit.tokens.to_string())
        .replace("@REFERENCE@", &kit.reference)
        .replace("@PARTS@", &parts.join("\n"))
}
