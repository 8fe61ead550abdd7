//! What the Hexagon compiler made of a graph, against what was meant.
//!
//! The compiler takes what it does not like without a word: an operator becomes float, an operand
//! loses half of its bits, a node stays on the CPU. [`audit`] reads the list of operators that it
//! was given back and compares it with the graph node by node; [`Schematic`] reads what it made of
//! them: operators of the device and the bytes they move, which are known without a device.

mod compare;
mod dump;
mod schematic;

pub use compare::{Audit, Finding, FormatCount, Placement, Rule, audit};
pub use dump::{Dump, QnnDataType, QnnOp, QnnTensor};
pub use schematic::{NodeTraffic, Schematic, Traffic};

/// Why what the compiler wrote could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuditError {
    /// The list of operators is not of the known form.
    #[error("the compiler's list of operators: {problem}")]
    Dump {
        /// What is wrong.
        problem: String,
    },
    /// The schematic is not of the known form.
    #[error("the compiler's schematic, line {line}: {problem}")]
    Schematic {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
}
