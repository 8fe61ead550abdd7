use crate::EngineError;
use firesteel_checkpoint::{Weight, WeightFormat};
use firesteel_kernels::{Format, MatrixView, pack};
use firesteel_tensor::{Buffer, DType, SharedBytes};
use std::sync::Arc;

/// A weight matrix and where its bytes are.
pub(super) struct Matrix {
    format: Format,
    rows: usize,
    columns: usize,
    bytes: SharedBytes,
}

impl Matrix {
    pub(super) fn new(weight: &Weight) -> Result<Self, EngineError> {
        let (rows, columns) = match *weight.shape() {
            [rows, columns] => (rows, columns),
            _ => (1, weight.element_count()),
        };
        let matrix = |format, bytes: SharedBytes| {
            // The view proves length and alignment once for all uses.
            MatrixView::new(format, rows, columns, &bytes)?;
            Ok(Self { format, rows, columns, bytes })
        };
        if let (Some(format), Some(blocks)) = (packed_format(weight.format()), weight.blocks()) {
            let mut packed = Buffer::zeroed(format.packed_bytes(rows, columns)?);
            pack(format, blocks, rows, columns, packed.bytes_mut())?;
            return matrix(format, SharedBytes::new(Arc::new(packed)));
        }
        let float = match weight.dtype() {
            DType::F16 => Format::F16,
            DType::BF16 => Format::BF16,
            _ => Format::F32,
        };
        if let Some(bytes) = weight.bytes()
            && MatrixView::new(float, rows, columns, bytes).is_ok()
        {
            return matrix(float, bytes.clone());
        }
        // Separate projections, generated weights, odd offsets and block formats without a kernel.
        let dtype = weight.dtype();
        let mut copy = Buffer::zeroed(float.packed_bytes(rows, columns)?);
        weight.convert(0, dtype, copy.bytes_mut())?;
        matrix(float, SharedBytes::new(Arc::new(copy)))
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

/// The kernels' name of a block format; `None` for numbers and for blocks without a kernel.
fn packed_format(format: WeightFormat) -> Option<Format> {
    match format {
        WeightFormat::Q8_0 => Some(Format::Q8),
        WeightFormat::Q4_0 => Some(Format::Q4),
        WeightFormat::Q4K => Some(Format::Q4K),
        WeightFormat::Q6K => Some(Format::Q6K),
        _ => None,
    }
}
