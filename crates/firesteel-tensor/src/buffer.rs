use bytemuck::{cast_slice, cast_slice_mut};

/// Mutable bytes whose start is aligned to 8 bytes, so that they can be seen as any element type.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Buffer {
    words: Vec<u64>,
    length: usize,
}

impl Buffer {
    /// `length` zero bytes.
    pub fn zeroed(length: usize) -> Self {
        Self { words: vec![0; length.div_ceil(8)], length }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &cast_slice(&self.words)[..self.length]
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.words)[..self.length]
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }
}
