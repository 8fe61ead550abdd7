//! Profiling events of QNN as lines of CSV with seven columns: timestamp, message, value, unit,
//! timing source, level (ROOT or SUB-EVENT) and identifier. ONNX Runtime writes an eighth, the
//! operators of the ONNX graph, in some versions; it is not read. Values are not quoted, so a comma
//! in an identifier is a part of it.
//!
//! An execution has one ROOT event for the cycles of the accelerator, whose SUB-EVENTs are the
//! operators, and one for each of several times, of which 'QNN (execute) time' is that of the
//! caller.

use super::{
    ImportedReport, MAX_EVENTS, ReportFormat, Runs, amount, name, run_times, source, too_few,
};
use crate::{OperatorTime, Quantity};
use std::path::Path;

/// The columns that are read.
const COLUMNS: [&str; 7] = [
    "Msg Timestamp",
    "Message",
    "Time",
    "Unit of Measurement",
    "Timing Source",
    "Event Level",
    "Event Identifier",
];
/// A further column of some writers.
const SOURCE_OPS: &str = "ONNX Source Ops";
/// Cycles of an execution, whose sub-events are the operators.
const CYCLES: &str = "Accelerator (execute) time (cycles)";
/// Times of an execution: of the caller, or if the report has none, of the accelerator alone.
const TIMES: [&str; 2] = ["QNN (execute) time", "Accelerator (execute) time"];
/// Vector threads of an execution. A device has some; the emulator reports 0.
const THREADS: &str = "Number of HVX threads used";
/// End of the identifiers of operators.
const OPERATOR_END: &str = " (cycles)";

struct Row<'a> {
    value: f64,
    unit: &'a str,
    root: bool,
    identifier: &'a str,
}

pub(super) fn read(file: &Path, bytes: &[u8], warmup: usize) -> Result<ImportedReport, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').map(plain).collect();
    let further = match header.strip_prefix(&COLUMNS[..]) {
        Some([]) => false,
        Some([further]) if *further == SOURCE_OPS => true,
        _ => {
            let expected = COLUMNS.join(",");
            return Err(format!("line 1 is no header of QNN's; accepted: {expected}"));
        }
    };
    let mut runs = Runs::default();
    let mut in_cycles = false;
    let mut cycle_runs = 0usize;
    let mut times: [Vec<f64>; TIMES.len()] = Default::default();
    let mut emulated = None;
    for (index, line) in lines.enumerate() {
        if index >= MAX_EVENTS {
            return Err(format!("more than {MAX_EVENTS} lines"));
        }
        if line.trim().is_empty() {
            continue;
        }
        let number = index + 2;
        let row = row(line, further).map_err(|reason| format!("line {number}: {reason}"))?;
        let Some(row) = row else { continue };
        if !row.root {
            if in_cycles && row.unit == "CYCLES" {
                operator(&mut runs, &row).map_err(|reason| format!("line {number}: {reason}"))?;
            }
            continue;
        }
        if in_cycles {
            runs.end(warmup);
        }
        in_cycles = row.identifier == CYCLES && row.unit == "CYCLES";
        cycle_runs += usize::from(in_cycles);
        if row.identifier == THREADS && row.value == 0.0 {
            emulated = emulated.or(Some(number));
        }
        if let Some(at) = TIMES.iter().position(|known| *known == row.identifier)
            && row.unit == "US"
            && let Some(times) = times.get_mut(at)
        {
            times.push(row.value);
        }
    }
    if in_cycles {
        runs.end(warmup);
    }
    if let Some(number) = emulated {
        return Err(format!(
            "line {number}: an execution used 0 HVX threads, so it is from the emulator on a host; \
             its cycles and times are those of the host and say nothing about a device"
        ));
    }
    let Some((timed, times)) = TIMES.iter().zip(&times).find(|(_, times)| !times.is_empty()) else {
        return Err("has no execution; a session that only compiles writes such a file".into());
    };
    let executions = times.len();
    if cycle_runs > 0 && cycle_runs != executions {
        return Err(format!(
            "has {cycle_runs} executions with cycles and {executions} with a time; it is cut off, \
             or of several runs at once"
        ));
    }
    if executions <= warmup {
        return Err(too_few(executions, warmup));
    }
    Ok(ImportedReport {
        format: ReportFormat::QnnCsv,
        runs: run_times(times, warmup)?,
        timed: Some((*timed).to_owned()),
        operators: runs.finish(Quantity::Cycles, source(file)).into_iter().collect(),
        notes: Vec::new(),
    })
}

/// A line; `None` for an event whose value is no amount, as a text or a flag.
fn row(line: &str, further: bool) -> Result<Option<Row<'_>>, String> {
    let mut cells = line.splitn(COLUMNS.len(), ',');
    let mut cell = || cells.next().map(plain);
    let columns = (cell(), cell(), cell(), cell(), cell(), cell(), cell());
    let (Some(_), Some(_), Some(value), Some(unit), Some(_), Some(level), Some(mut identifier)) =
        columns
    else {
        return Err(format!("has fewer than {} columns", COLUMNS.len()));
    };
    if further {
        identifier = identifier
            .rsplit_once(',')
            .map(|(identifier, _)| plain(identifier))
            .ok_or_else(|| format!("has fewer than {} columns", COLUMNS.len() + 1))?;
    }
    let root = match level {
        "ROOT" => true,
        "SUB-EVENT" => false,
        _ => {
            let start: String = level.chars().take(40).collect();
            return Err(format!("the level is {start:?}; accepted: ROOT, SUB-EVENT"));
        }
    };
    if !matches!(unit, "US" | "CYCLES" | "COUNT") {
        return Ok(None);
    }
    let start = || value.chars().take(40).collect::<String>();
    let parsed =
        value.parse::<f64>().map_err(|_| format!("the value {:?} is no number", start()))?;
    Ok(Some(Row { value: amount("the value", parsed)?, unit, root, identifier }))
}

/// A cell without the spaces and quotes around it.
fn plain(cell: &str) -> &str {
    let cell = cell.trim();
    cell.strip_prefix('"').and_then(|cell| cell.strip_suffix('"')).unwrap_or(cell).trim()
}

/// Adds an operator: `NAME:OpId_N (cycles)`.
fn operator(runs: &mut Runs, row: &Row<'_>) -> Result<(), String> {
    let key = row.identifier.strip_suffix(OPERATOR_END).unwrap_or(row.identifier);
    let node = key.rsplit_once("OpId_").map_or(key, |(node, _)| node.trim_end_matches([':', ' ']));
    name("an operator", node)?;
    let operator =
        OperatorTime { name: node.to_owned(), operator: None, unit: None, amount: row.value };
    runs.add(key, operator)
}
