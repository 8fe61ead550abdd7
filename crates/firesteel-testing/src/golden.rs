use safetensors::SafeTensors;
use std::path::Path;

/// Tensors of a safetensors file.
#[derive(Debug)]
pub struct Golden(Vec<u8>);

impl Golden {
    /// Reads a file; see [`golden_path`](crate::golden_path).
    ///
    /// # Panics
    /// When there is no such file.
    pub fn open(path: &Path) -> Self {
        Self(std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    }

    /// Numbers of four bytes each.
    fn words<T>(&self, name: &str, from: impl Fn([u8; 4]) -> T) -> Vec<T> {
        self.bytes(name).chunks_exact(4).map(|b| from(b.try_into().unwrap())).collect()
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        tensor.data().to_vec()
    }

    /// A tensor of f32.
    ///
    /// # Panics
    /// When the file has no tensor of that name.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.words(name, f32::from_le_bytes)
    }

    /// A tensor of token ids in 32 bits.
    ///
    /// # Panics
    /// When the file has no tensor of that name.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.words(name, u32::from_le_bytes)
    }

    /// A tensor of f64.
    ///
    /// # Panics
    /// When the file has no tensor of that name.
    pub fn f64(&self, name: &str) -> Vec<f64> {
        let bytes = self.bytes(name);
        bytes.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}
