use super::worker::worker_command;
use crate::printer::{Printer, mebibytes, table};
use crate::source::OrtArgs;
use anyhow::{Context as _, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use firesteel_artifact::Artifact;
use firesteel_check::audit::{Audit, Rule};
use firesteel_checkpoint::cache_root;
use firesteel_compile::{
    CompileOptions, CompileProgress, Compiled, PartEntry, PartRole, Split, compile,
};
use firesteel_model::PathKind;
use firesteel_ort::qnn::{Performance, SOCS, Soc};
use firesteel_profile::VTCM_BYTES;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::process::ExitCode;

/// Compile artifacts for the NPU of a phone and audit what the compiler made of them.
///
/// Qualcomm's compiler runs in a child process. What it got is compared with the graph: a node on
/// the CPU, a node that became float, an operand that lost bits is an error that names it.
#[derive(Debug, Args)]
pub(crate) struct Compile {
    /// Artifacts of the qnn dialect: one, or one for each step (decode, prefill) of the same model
    #[arg(required = true, value_name = "ARTIFACT")]
    artifacts: Vec<PathBuf>,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The phone's chip
    #[arg(long, value_name = "NAME", help = soc_help())]
    soc: String,
    /// How fast and hungry the device is asked to be; for the host, the binary is the same
    #[arg(long, value_name = "MODE", default_value = Performance::Burst.option(),
          value_parser = one_of(&Performance::ALL, Performance::option))]
    perf: Performance,
    /// The steps that the artifacts must be: decode, prefill-T
    #[arg(long, value_name = "NAME,NAME,…", value_delimiter = ',')]
    graphs: Option<Vec<String>>,
    /// Also put all steps into one binary that holds their weights once
    #[arg(long)]
    share_weights: bool,
    /// Cut the layers into parts: a number, or auto for as few as are possible
    #[arg(long, value_name = "N|auto", value_parser = split, default_value = "auto")]
    split: Split,
    /// Rules of the audit that may be broken; the manifest says which
    #[arg(long, value_name = "RULE,…", value_delimiter = ',',
          value_parser = one_of(ALLOWABLE, Rule::name))]
    allow: Vec<Rule>,
    #[command(flatten)]
    ort: OrtArgs,
    /// Replace an existing compiled artifact
    #[arg(long)]
    force: bool,
    /// Print the manifest as JSON
    #[arg(long)]
    json: bool,
}

/// A node on the CPU is in no binary, so there is nothing to let pass.
const ALLOWABLE: &[Rule] = &[
    Rule::Float,
    Rule::Convert,
    Rule::Operator,
    Rule::Decomposed,
    Rule::Weight,
    Rule::Inserted,
    Rule::Missing,
    Rule::Target,
];

/// Accepts the name of one of `all`.
fn one_of<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(all.iter().map(|value| name(*value)));
    names.try_map(move |text| {
        all.iter().copied().find(|value| name(*value) == text).ok_or("is not accepted")
    })
}

fn soc_help() -> String {
    let names: Vec<String> =
        SOCS.iter().map(|soc| format!("{} ({}, {})", soc.name, soc.title, soc.phone)).collect();
    format!("The phone's chip: {}", names.join(", "))
}

fn split(text: &str) -> Result<Split, String> {
    match text {
        "auto" => Ok(Split::Auto),
        number => match number.parse() {
            Ok(parts) if parts > 0 => Ok(Split::Parts(parts)),
            _ => Err("auto or a number from 1 on is accepted".into()),
        },
    }
}

impl Compile {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let soc = Soc::find(&self.soc)?;
        let mut artifacts = Vec::with_capacity(self.artifacts.len());
        for path in &self.artifacts {
            match PathKind::of(path)? {
                PathKind::Artifact => artifacts.push(Artifact::open(path)?),
                PathKind::Compiled => bail!(
                    "{} is compiled already; give the artifact that export wrote",
                    path.display()
                ),
                _ => bail!("{} is no artifact; export the checkpoint first", path.display()),
            }
        }
        let options = CompileOptions {
            soc,
            performance: self.perf,
            split: self.split,
            share_weights: self.share_weights,
            allow: self.allow.iter().copied().collect(),
            limits: self.ort.limits(),
            library: self.ort.ort.clone(),
            worker: worker_command()?,
            cache: cache_root()?.join("compiled"),
            force: self.force,
        };
        if let Some(graphs) = &self.graphs {
            let names = firesteel_compile::step_names(&artifacts)?;
            if *graphs != names {
                bail!("--graphs {}: the artifacts are {}", graphs.join(","), names.join(","));
            }
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(style);
        }
        let mut part = String::new();
        let compiled = compile(&artifacts, &options, &self.out, &mut |progress| match progress {
            CompileProgress::Waiting => printer.talk("waiting for another process that compiles"),
            CompileProgress::Part { name, number, count, finished } => {
                part = format!("compiling {name} ({number} of {count}) for {}", soc.name);
                bar.set_message(part.clone());
                if finished {
                    printer.talk(&format!("{name} was compiled before"));
                }
            }
            CompileProgress::Working { time, memory } => {
                bar.set_message(format!("{part}: {} s, {}", time.as_secs(), mebibytes(memory)));
                bar.tick();
            }
            CompileProgress::Done { time, memory } => {
                let (seconds, memory) = (time.as_secs(), mebibytes(memory));
                printer.talk(&format!("{part}: took {seconds} s and {memory} of memory"));
            }
        });
        bar.finish_and_clear();
        let compiled = compiled.with_context(|| {
            let hint = if self.force || !self.out.exists() {
                ""
            } else {
                " (--force replaces a compiled artifact)"
            };
            format!("{} was not written{hint}", self.out.display())
        })?;
        if self.json {
            printer.json(compiled.manifest())?;
        } else {
            printer.line(format!("wrote {}", self.out.display()))?;
            print_compiled(&compiled, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints what a compiled artifact is, with the audit of every part.
pub(crate) fn print_compiled(compiled: &Compiled, printer: &mut Printer) -> anyhow::Result<()> {
    let manifest = compiled.manifest();
    let (target, libraries) = (&manifest.target, &manifest.libraries);
    printer.line(format!(
        "compiled for {} (number {}, v{}), {} clocks asked for",
        target.soc,
        target.soc_number,
        target.arch,
        target.performance.option()
    ))?;
    printer.line(format!(
        "by QNN SDK {}, ONNX Runtime {} with its QNN plugin {}",
        libraries.qnn_sdk, libraries.onnxruntime, libraries.onnxruntime_qnn
    ))?;
    if !manifest.calibrated() {
        printer.line("UNCALIBRATED: its numbers are wrong, only times mean something")?;
    }
    for step in &manifest.steps {
        for part in &step.parts {
            print_part(part, printer)?;
        }
        if let Some(measured) = &step.measured {
            printer.line(format!("{}: measured on the emulator, {measured}", step.name))?;
        }
    }
    if let Some(shared) = &manifest.shared {
        let names: Vec<&str> = shared.contexts.iter().map(|(name, _)| name.as_str()).collect();
        printer.line(format!(
            "{} holds {} with their weights once: {} bytes, {}; the emulator cannot load it, so \
             what is audited and checked are the binaries of their own",
            shared.binary,
            names.join(" and "),
            shared.bytes,
            mebibytes(shared.bytes)
        ))?;
    }
    Ok(())
}

fn print_part(part: &PartEntry, printer: &mut Printer) -> anyhow::Result<()> {
    let what = match &part.role {
        PartRole::Layers { step } => {
            let first = step.first_layer;
            format!("layers {first}..{}", first + step.layers.len())
        }
        PartRole::Head { rows } => format!("rows {}..{} of the head", rows.start, rows.end),
    };
    printer.line(format!(
        "{}: {what}, {} of {}",
        part.name,
        mebibytes(part.binary_bytes),
        part.binary
    ))?;
    let Audit { qnn_ops, weights, moved, schematic, findings } = &part.audit;
    let counts: Vec<String> = qnn_ops.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    printer.line(format!("  {} ops: {}", qnn_ops.values().sum::<usize>(), counts.join(", ")))?;
    let counts: Vec<String> = weights
        .iter()
        .map(|(format, count)| format!("{} {format} of {} elements", count.tensors, count.elements))
        .collect();
    printer.line(format!("  weights: {}", counts.join(", ")))?;
    if !moved.is_empty() {
        printer.line(format!("  transposes moved by ONNX Runtime: {}", moved.len()))?;
    }
    if let Some(schematic) = schematic {
        let total = &schematic.total;
        printer.line(format!(
            "  planned a step: {} ops of the HTP, DRAM {} read and {} written, VTCM {} read and {} \
             written",
            total.htp_ops,
            mebibytes(total.dram_read),
            mebibytes(total.dram_write),
            mebibytes(total.vtcm_read),
            mebibytes(total.vtcm_write)
        ))?;
        if let (Some(vtcm), Some(spilled)) = (schematic.vtcm_bytes, schematic.memory_values_bytes) {
            printer.line(format!(
                "  in use: {} of the {} of VTCM, {} of values between operators in memory",
                mebibytes(vtcm),
                mebibytes(VTCM_BYTES),
                mebibytes(spilled)
            ))?;
        }
        let mut nodes: Vec<_> = schematic.nodes.iter().collect();
        nodes.sort_by_key(|node| std::cmp::Reverse(node.traffic.dram_read));
        let titles = ["  most read", "HTP ops", "DRAM read", "written", "VTCM read", "written"];
        let mut rows = vec![titles.map(str::to_owned).to_vec()];
        for node in nodes.into_iter().take(SHOWN) {
            let traffic = &node.traffic;
            rows.push(vec![
                format!("  {}", node.node),
                traffic.htp_ops.to_string(),
                mebibytes(traffic.dram_read),
                mebibytes(traffic.dram_write),
                mebibytes(traffic.vtcm_read),
                mebibytes(traffic.vtcm_write),
            ]);
        }
        for line in table(&rows) {
            printer.line(line)?;
        }
    }
    if findings.is_empty() {
        return Ok(printer.line("  audit: every node is one op of its kind on the HTP")?);
    }
    for finding in findings {
        printer.line(format!("  allowed: {finding}"))?;
    }
    Ok(())
}

/// Nodes whose traffic is printed for a part; the manifest has all.
const SHOWN: usize = 8;
