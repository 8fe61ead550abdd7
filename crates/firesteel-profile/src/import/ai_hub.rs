//! The profile of a job of Qualcomm AI Hub: an object with `execution_summary` and
//! `execution_detail`, times in microseconds. Fields as `download_profile` of the PyPI package
//! qai-hub 0.56.0 makes them.

use super::{
    BoundedList, ImportedReport, MAX_OPERATORS, ReportFormat, amount, name, run_times, source,
};
use crate::{OperatorTime, OperatorTimes, Provenance, Quantity, RunTimes};
use serde::Deserialize;
use std::path::Path;

#[derive(Deserialize)]
struct Profile {
    execution_summary: Summary,
    execution_detail: BoundedList<Layer>,
}

#[derive(Deserialize)]
struct Summary {
    estimated_inference_time: Option<f64>,
    #[serde(default)]
    all_inference_times: BoundedList<f64>,
}

#[derive(Deserialize)]
struct Layer {
    name: String,
    #[serde(rename = "type")]
    operator: String,
    compute_unit: String,
    execution_time: Option<f64>,
    execution_cycles: Option<f64>,
}

pub(super) fn read(file: &Path, bytes: &[u8], warmup: usize) -> Result<ImportedReport, String> {
    let profile: Profile = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let BoundedList(layers) = profile.execution_detail;
    if layers.len() > MAX_OPERATORS {
        return Err(format!("execution_detail has more than {MAX_OPERATORS} operators"));
    }
    let mut micros = Vec::new();
    for value in &profile.execution_summary.all_inference_times.0 {
        micros.push(amount("a value of all_inference_times", *value)?);
    }
    let estimate = profile.execution_summary.estimated_inference_time;
    let estimate = estimate.map(|value| amount("estimated_inference_time", value)).transpose()?;
    let mut notes = Vec::new();
    let (runs, timed) = match (run_times(&micros, warmup)?, estimate) {
        (Some(runs), estimate) => {
            if let Some(estimate) = estimate {
                notes.push(format!("estimated_inference_time is {estimate} microseconds"));
            }
            (Some(runs), Some("all_inference_times".to_owned()))
        }
        (None, Some(_)) if warmup > 0 => {
            return Err("has no all_inference_times, so no warm-up can be left out".into());
        }
        (None, Some(estimate)) => {
            let runs = RunTimes::unstated(estimate / 1000.0);
            (Some(runs), Some("estimated_inference_time".to_owned()))
        }
        (None, None) => (None, None),
    };
    let mut lists = Vec::new();
    for layer in &layers {
        name("a name of execution_detail", &layer.name)?;
        name("a type of execution_detail", &layer.operator)?;
        name("a compute_unit of execution_detail", &layer.compute_unit)?;
    }
    for quantity in [Quantity::Cycles, Quantity::Microseconds] {
        let mut operators = Vec::new();
        for layer in &layers {
            let value = match quantity {
                Quantity::Cycles => layer.execution_cycles,
                _ => layer.execution_time,
            };
            if let Some(value) = value {
                operators.push(OperatorTime {
                    name: layer.name.clone(),
                    operator: Some(layer.operator.clone()),
                    unit: Some(layer.compute_unit.clone()),
                    amount: amount(&layer.name, value)?,
                });
            }
        }
        let without = layers.len() - operators.len();
        if operators.is_empty() {
            continue;
        }
        if without > 0 {
            notes.push(format!("{without} of {} operators have no {quantity}", layers.len()));
        }
        let provenance = Provenance::Imported;
        lists.push(OperatorTimes { quantity, provenance, source: source(file), operators });
    }
    Ok(ImportedReport { format: ReportFormat::AiHub, runs, timed, operators: lists, notes })
}
