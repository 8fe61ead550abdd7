//! The model of a path on the command line, and who runs it.

use crate::commands::worker::worker_command;
use crate::printer::Printer;
use anyhow::bail;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use firesteel_engine::KvFormat;
use firesteel_model::{DecoderOptions, Model, RunnerKind, RunnerOptions, SequenceDecoder};
use firesteel_ort::qnn::Limits;
use firesteel_step::{Decoder, StepSpec};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Takes the names of runners.
pub(crate) fn runner_names() -> impl TypedValueParser<Value = RunnerKind> {
    let named = |kind: RunnerKind| PossibleValue::new(kind.name()).help(kind.about());
    PossibleValuesParser::new(RunnerKind::ALL.map(named)).try_map(|name| name.parse())
}

/// Opens what `path` is and says its warnings.
pub(crate) fn open(path: &Path, printer: &mut Printer) -> anyhow::Result<Model> {
    let model = Model::open(path)?;
    model.warnings().iter().for_each(|warning| printer.warn(warning));
    Ok(model)
}

/// A decoder of `model`, whose warnings are said.
pub(crate) fn decoder(
    model: &Model,
    spec: &StepSpec,
    options: &DecoderOptions<'_>,
    printer: &mut Printer,
) -> anyhow::Result<Box<dyn Decoder>> {
    let SequenceDecoder { decoder, warnings } = model.decoder(spec, options)?;
    warnings.iter().for_each(|warning| printer.warn(warning));
    Ok(decoder)
}

/// Where ONNX Runtime is, and what a process of its own may use.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OrtArgs {
    /// ONNX Runtime library, or a folder that holds it; else FIRESTEEL_ORT, else what
    /// `firesteel setup ort` installed.
    #[arg(long, value_name = "PATH")]
    pub(crate) ort: Option<PathBuf>,
    /// Memory of the process that compiles or emulates the HTP, in MiB [default: nine tenths of
    /// what is free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    memory_limit: Option<u64>,
    /// Time of that process, in seconds [default: 3600]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    time_limit: Option<u64>,
}

impl OrtArgs {
    /// Refuses what none of these runners has a use for.
    pub(crate) fn refuse_unused(&self, kinds: &[RunnerKind]) -> anyhow::Result<()> {
        use RunnerKind::{Htp, Ort};
        let given: [(&str, bool, &[RunnerKind]); 3] = [
            ("--ort", self.ort.is_some(), &[Ort, Htp]),
            ("--memory-limit", self.memory_limit.is_some(), &[Htp]),
            ("--time-limit", self.time_limit.is_some(), &[Htp]),
        ];
        for (option, _, users) in given.into_iter().filter(|(_, given, _)| *given) {
            if !kinds.iter().any(|kind| users.contains(kind)) {
                let users: Vec<String> = users.iter().map(|kind| kind.to_string()).collect();
                bail!(
                    "{option} does nothing, because nothing runs on {}; leave it out, or choose \
                     such a runner",
                    users.join(" or ")
                );
            }
        }
        Ok(())
    }

    /// The limits of a process that compiles or emulates.
    pub(crate) fn limits(&self) -> Limits {
        let default = RunnerOptions::default().limits;
        Limits {
            memory: self.memory_limit.map(|mebibytes| mebibytes << 20),
            time: self.time_limit.map_or(default.time, Duration::from_secs),
        }
    }

    /// How runners are made, this program being the worker.
    pub(crate) fn options(&self) -> anyhow::Result<RunnerOptions> {
        let worker = Some(worker_command()?);
        Ok(RunnerOptions { library: self.ort.clone(), worker, limits: self.limits() })
    }
}

/// What `option` says of keys and values, which only the CPU's kernels store in a format of their
/// own.
pub(crate) fn kv_format(
    option: &str,
    given: Option<KvFormat>,
    kind: RunnerKind,
) -> anyhow::Result<Option<KvFormat>> {
    if let Some(format) = given.filter(|_| kind != RunnerKind::Cpu) {
        bail!(
            "{option} {} does nothing on {}, whose caches are those of the step; leave it out, or \
             run a checkpoint on the cpu runner",
            format.name(),
            kind
        );
    }
    Ok(given)
}
