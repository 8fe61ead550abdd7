use firesteel_checkpoint::CheckpointError;
use firesteel_export::ExportError;
use std::path::PathBuf;

/// What can go wrong with tables, compositions and counts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A file is no table.
    #[error("{}: {reason}", file.display())]
    Table {
        /// The file.
        file: PathBuf,
        /// Why, and what is accepted.
        reason: String,
    },
    /// A file is no report of a tool that is known.
    #[error("{}: {reason}", file.display())]
    Report {
        /// The file.
        file: PathBuf,
        /// Why, and what is accepted.
        reason: String,
    },
    /// A value of a table is not accepted.
    #[error("{}: {place}: {key} is {value}; accepted: {accepted}", file.display())]
    Value {
        /// The file.
        file: PathBuf,
        /// Part of the file.
        place: String,
        /// Key within that part.
        key: &'static str,
        /// The value.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// A table is of layers of another shape.
    #[error(
        "the table's layers have {key} {table}, and this model's have {model}; use a table that \
         was measured with this model"
    )]
    Shape {
        /// What differs.
        key: &'static str,
        /// Value of the table.
        table: String,
        /// Value of the model.
        model: String,
    },
    /// What was asked for cannot be had.
    #[error("{what} is {value}; accepted: {accepted}")]
    Choice {
        /// The option.
        what: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// The table's model is none.
    #[error(transparent)]
    Config(#[from] CheckpointError),
    /// The step's graph cannot be made.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A count of bytes does not fit in 64 bits.
    #[error("the bytes of {what} do not fit in 64 bits")]
    Overflow {
        /// What was counted.
        what: &'static str,
    },
}
