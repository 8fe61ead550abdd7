use super::packed::{Packed, Unpacked, float_format, widened};
use crate::EngineError;
use firesteel_checkpoint::Weight;
use firesteel_kernels::{Format, MatrixView};
use firesteel_tensor::SharedBytes;

/// A weight matrix and where its bytes are.
pub(super) struct Matrix {
    format: Format,
    rows: usize,
    columns: usize,
    bytes: SharedBytes,
}

fn shape(weight: &Weight) -> (usize, usize) {
    match *weight.shape() {
        [rows, columns] => (rows, columns),
        _ => (1, weight.element_count()),
    }
}

impl Matrix {
    /// The bytes of a weight that the kernels take as it lies in its file.
    fn mapped(weight: &Weight) -> Option<&SharedBytes> {
        let (rows, columns) = shape(weight);
        let fits = |bytes: &&SharedBytes| {
            MatrixView::new(float_format(weight), rows, columns, bytes).is_ok()
        };
        weight.bytes().filter(fits)
    }

    /// What has to be packed for [`Matrix::new`], if anything.
    pub(super) fn unpacked(weight: &Weight) -> Result<Option<Unpacked<'_>>, EngineError> {
        if Self::mapped(weight).is_some() {
            return Ok(None);
        }
        let (rows, columns) = shape(weight);
        Unpacked::new(weight, rows, columns).map(Some)
    }

    /// The matrix, where it lies or from `packed`.
    pub(super) fn new(weight: &Weight, packed: &Packed) -> Result<Self, EngineError> {
        let (rows, columns) = shape(weight);
        let (format, bytes) = match Self::mapped(weight) {
            Some(bytes) => (float_format(weight), bytes.clone()),
            None => packed.get(&Unpacked::new(weight, rows, columns)?)?,
        };
        // The view proves length and alignment once for all uses.
        MatrixView::new(format, rows, columns, &bytes)?;
        Ok(Self { format, rows, columns, bytes })
    }

    /// The matrix as numbers: where it lies, or with the values of its blocks in memory.
    pub(super) fn plain(weight: &Weight) -> Result<Self, EngineError> {
        let (rows, columns) = shape(weight);
        let bytes = match Self::mapped(weight) {
            Some(bytes) => bytes.clone(),
            None => widened(weight, rows, columns)?,
        };
        let format = float_format(weight);
        MatrixView::new(format, rows, columns, &bytes)?;
        Ok(Self { format, rows, columns, bytes })
    }

    pub(super) fn view(&self) -> Result<MatrixView<'_>, EngineError> {
        Ok(MatrixView::new(self.format, self.rows, self.columns, &self.bytes)?)
    }

    pub(super) fn is_quantized(&self) -> bool {
        self.format.is_quantized()
    }

    /// Outputs of a product.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs of a product.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that a product reads.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }
}
