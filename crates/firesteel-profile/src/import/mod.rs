//! Reports of other tools. They come from other people's machines, so nothing in them is trusted:
//! sizes, counts, names and numbers are bounded, and what is not understood is an error.

mod ai_hub;
mod ort;
mod qnn_csv;

use crate::table::is_plain;
use crate::times::median;
use crate::{OperatorTime, OperatorTimes, ProfileError, Provenance, Quantity, RunTimes};
use firesteel_checkpoint::mistaken_file;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

/// Longest report, in bytes.
pub const REPORT_LIMIT: u64 = 256 << 20;
/// Most events, rows or operators of a report.
const MAX_EVENTS: usize = 2_000_000;
/// Most different operators of a graph.
const MAX_OPERATORS: usize = 100_000;
/// Longest name of an operator, in bytes.
const MAX_NAME: usize = 1000;
/// Largest amount, which no step reaches: eleven days in microseconds, minutes in cycles.
const MAX_AMOUNT: f64 = 1e12;

/// Which tool wrote a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportFormat {
    /// The profile of a job of Qualcomm AI Hub, as `download_profile` of the PyPI package
    /// `qai-hub` writes it.
    AiHub,
    /// A trace of ONNX Runtime (`enable_profiling`).
    Ort,
    /// Profiling events of QNN as lines of CSV: `profiling_file_path` of ONNX Runtime's QNN
    /// provider, or `qnn-profile-viewer`.
    QnnCsv,
}

impl ReportFormat {
    /// Spelling on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AiHub => "ai-hub",
            Self::Ort => "ort",
            Self::QnnCsv => "qnn-csv",
        }
    }

    /// What `bytes` begin like; an object is a profile of AI Hub, a list a trace.
    fn detect(bytes: &[u8]) -> Option<Self> {
        let start = bytes.trim_ascii_start();
        match start.first()? {
            b'{' => Some(Self::AiHub),
            b'[' => Some(Self::Ort),
            _ if start.starts_with(b"Msg Timestamp") => Some(Self::QnnCsv),
            _ => None,
        }
    }
}

impl fmt::Display for ReportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a report says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ImportedReport {
    /// Who wrote it.
    pub format: ReportFormat,
    /// Whole runs of the graph; `None` when the report has none.
    pub runs: Option<RunTimes>,
    /// What the times of the runs are, as the report names it.
    pub timed: Option<String>,
    /// What single operators took, one list a quantity; a list has only the operators that the
    /// report has this quantity for.
    pub operators: Vec<OperatorTimes>,
    /// What a reader should know about the report.
    pub notes: Vec<String>,
}

/// Reads a report with contents `bytes`; `file` is its name in messages. Of the runs the first
/// `warmup` are left out; a report of AI Hub has its operators without runs, so there it concerns
/// the times of the whole graph only. Operators of a report with runs have the median over those
/// runs that ran them.
///
/// # Errors
/// When the report is too large, is not understood or contradicts itself, when it has no runs
/// beyond `warmup`, and when it is from the emulator of the HTP, whose times are those of a host.
pub fn import_report(
    file: &Path,
    bytes: &[u8],
    format: Option<ReportFormat>,
    warmup: usize,
) -> Result<ImportedReport, ProfileError> {
    let refuse = |reason: String| ProfileError::Report { file: file.into(), reason };
    if bytes.len() as u64 > REPORT_LIMIT {
        return Err(refuse(format!(
            "{} bytes long; accepted: at most {REPORT_LIMIT}",
            bytes.len()
        )));
    }
    if let Some(mistake) = mistaken_file(bytes) {
        return Err(refuse(mistake.into()));
    }
    let Some(format) = format.or_else(|| ReportFormat::detect(bytes)) else {
        return Err(refuse(
            "no known report; accepted: a profile of AI Hub (a JSON object), a trace of ONNX \
             Runtime (a JSON list), or CSV of QNN (first column 'Msg Timestamp')"
                .into(),
        ));
    };
    let report = match format {
        ReportFormat::AiHub => ai_hub::read(file, bytes, warmup),
        ReportFormat::Ort => ort::read(file, bytes, warmup),
        ReportFormat::QnnCsv => qnn_csv::read(file, bytes, warmup),
    };
    report.map_err(|reason| refuse(format!("{format}: {reason}")))
}

/// The runs in ms without the first `warmup`, from microseconds; `None` when there are none at all.
fn run_times(micros: &[f64], warmup: usize) -> Result<Option<RunTimes>, String> {
    if micros.is_empty() {
        return Ok(None);
    }
    let kept = micros.get(warmup..).unwrap_or_default();
    let ms: Vec<f64> = kept.iter().map(|micros| micros / 1000.0).collect();
    let times = RunTimes::of_runs(&ms).ok_or_else(|| too_few(micros.len(), warmup))?;
    Ok(Some(times))
}

fn too_few(runs: usize, warmup: usize) -> String {
    format!("has {runs} runs, all of which the warm-up of {warmup} leaves out; give a smaller one")
}

/// A number of a report: finite, not negative, and one that a machine can have taken.
fn amount(what: &str, value: f64) -> Result<f64, String> {
    if (0.0..=MAX_AMOUNT).contains(&value) {
        return Ok(value);
    }
    Err(format!("{what} is {value}; accepted: 0 to {MAX_AMOUNT}"))
}

/// A name of a report, short enough to print and without what would act on a terminal.
fn name(what: &str, value: &str) -> Result<(), String> {
    if is_plain(value, MAX_NAME) {
        return Ok(());
    }
    let start: String = value.chars().take(40).collect();
    Err(format!("{what} is {start:?}; accepted: 1 to {MAX_NAME} bytes without control characters"))
}

/// Adds up what operators took in each run of a graph.
#[derive(Default)]
struct Runs {
    order: Vec<OperatorTime>,
    index: HashMap<String, usize>,
    /// What operators took in the run at hand.
    current: HashMap<usize, f64>,
    /// What each took in every run that ran it.
    amounts: Vec<Vec<f64>>,
    runs: usize,
}

impl Runs {
    /// An operator of the run at hand, known by `key`; what runs several times in one run counts
    /// each time.
    fn add(&mut self, key: &str, operator: OperatorTime) -> Result<(), String> {
        let index = match self.index.get(key) {
            Some(index) => *index,
            None => {
                let index = self.order.len();
                if index >= MAX_OPERATORS {
                    return Err(format!("more than {MAX_OPERATORS} operators"));
                }
                self.index.insert(key.to_owned(), index);
                self.order.push(OperatorTime { amount: 0.0, ..operator.clone() });
                self.amounts.push(Vec::new());
                index
            }
        };
        *self.current.entry(index).or_default() += operator.amount;
        Ok(())
    }

    /// Ends a run, which counts only behind the first `warmup`.
    fn end(&mut self, warmup: usize) {
        let counts = self.runs >= warmup;
        self.runs += 1;
        for (index, amount) in self.current.drain() {
            if let Some(amounts) = self.amounts.get_mut(index)
                && counts
            {
                amounts.push(amount);
            }
        }
    }

    /// The median over the runs of every operator that one of them ran; `None` without any.
    fn finish(mut self, quantity: Quantity, source: String) -> Option<OperatorTimes> {
        let mut operators = Vec::new();
        for (operator, amounts) in self.order.into_iter().zip(&mut self.amounts) {
            amounts.sort_by(f64::total_cmp);
            if let Some(amount) = median(amounts) {
                operators.push(OperatorTime { amount, ..operator });
            }
        }
        let provenance = Provenance::Imported;
        (!operators.is_empty()).then_some(OperatorTimes { quantity, provenance, source, operators })
    }
}

/// The file's name, as the source of its numbers.
fn source(file: &Path) -> String {
    file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}

/// A list of at most [`MAX_EVENTS`] values, refused before it can grow beyond.
struct BoundedList<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Vec<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_EVENTS} values")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    if values.len() >= MAX_EVENTS {
                        return Err(A::Error::custom(format!("more than {MAX_EVENTS} values")));
                    }
                    values.push(value);
                }
                Ok(values)
            }
        }
        deserializer.deserialize_seq(List(PhantomData)).map(Self)
    }
}

impl<T> Default for BoundedList<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}
