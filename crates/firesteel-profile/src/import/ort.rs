//! A trace of ONNX Runtime: a list of events with times in microseconds. An operator's event is of
//! the category Node, has a name that ends in `_kernel_time`, and stands before the `model_run` of
//! the session that it belongs to.

use super::{
    BoundedList, ImportedReport, ReportFormat, Runs, amount, name, run_times, source, too_few,
};
use crate::{OperatorTime, Quantity};
use serde::Deserialize;
use std::borrow::Cow;
use std::path::Path;

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    cat: Cow<'a, str>,
    #[serde(borrow)]
    name: Cow<'a, str>,
    dur: f64,
    #[serde(borrow, default)]
    args: Args<'a>,
}

#[derive(Deserialize, Default)]
struct Args<'a> {
    #[serde(borrow)]
    op_name: Option<Cow<'a, str>>,
    #[serde(borrow)]
    provider: Option<Cow<'a, str>>,
}

/// End of the names of operators' events.
const KERNEL: &str = "_kernel_time";

pub(super) fn read(file: &Path, bytes: &[u8], warmup: usize) -> Result<ImportedReport, String> {
    let BoundedList(events): BoundedList<Event<'_>> =
        serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let mut runs = Runs::default();
    let mut micros = Vec::new();
    for event in &events {
        let dur = amount("a dur", event.dur)?;
        match (event.cat.as_ref(), event.name.as_ref()) {
            ("Session", "model_run") => {
                micros.push(dur);
                runs.end(warmup);
            }
            ("Node", node) => {
                let Some(node) = node.strip_suffix(KERNEL) else { continue };
                name("the name of a node", node)?;
                for (what, value) in
                    [("an op_name", &event.args.op_name), ("a provider", &event.args.provider)]
                {
                    if let Some(value) = value {
                        name(what, value)?;
                    }
                }
                let operator = OperatorTime {
                    name: node.to_owned(),
                    operator: event.args.op_name.as_deref().map(str::to_owned),
                    unit: event.args.provider.as_deref().map(str::to_owned),
                    amount: dur,
                };
                runs.add(node, operator)?;
            }
            _ => {}
        }
    }
    let mut notes = Vec::new();
    if !runs.current.is_empty() {
        notes
            .push(format!("{} operators of a run without an end are left out", runs.current.len()));
    }
    if micros.is_empty() {
        return Err("has no model_run, so nothing was run while it was written".into());
    }
    if micros.len() <= warmup {
        return Err(too_few(micros.len(), warmup));
    }
    let operators = runs.finish(Quantity::Microseconds, source(file));
    Ok(ImportedReport {
        format: ReportFormat::Ort,
        runs: run_times(&micros, warmup)?,
        timed: Some("model_run".into()),
        operators: operators.into_iter().collect(),
        notes,
    })
}
