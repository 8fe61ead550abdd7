use serde::Serialize;
use std::fmt;

/// What the amounts of a list of operators count. Amounts of different quantities are never added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Cycles of the device's processor.
    Cycles,
    /// Microseconds.
    Microseconds,
    /// Bytes moved.
    Bytes,
}

impl Quantity {
    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cycles => "cycles",
            Self::Microseconds => "microseconds",
            Self::Bytes => "bytes",
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the amounts of a list of operators came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Provenance {
    /// Measured by this program on this machine.
    Measured,
    /// Read from the report of another tool, which measured it.
    Imported,
    /// Read from a compiler's plan: nothing was run.
    Compiled,
    /// Computed from other numbers.
    Estimated,
}

/// One operator of a graph and what it took.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperatorTime {
    /// Name of the node, as the source has it.
    pub name: String,
    /// Type of the operator, as the source spells it; `None` when the source has names only.
    pub operator: Option<String>,
    /// The unit that ran it, as the source spells it.
    pub unit: Option<String>,
    /// The amount, finite and not negative, in the quantity of the list.
    pub amount: f64,
}

/// What the operators of one graph took in one run of it, all in the same quantity and from the
/// same source.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperatorTimes {
    /// What the amounts count.
    pub quantity: Quantity,
    /// How they came about.
    pub provenance: Provenance,
    /// The file or tool they are from, for a reader.
    pub source: String,
    /// The operators in the order of the source.
    pub operators: Vec<OperatorTime>,
}

impl OperatorTimes {
    /// The sum of all amounts. It is at least the time of the graph, because operators that run at
    /// the same time count each.
    pub fn total(&self) -> f64 {
        self.operators.iter().map(|operator| operator.amount).sum()
    }
}
