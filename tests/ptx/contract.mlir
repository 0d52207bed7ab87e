// One warp, C = A B^T + C and C = A B + C through vector.contract: MLIR's own distribution of the fragments, to check the interpreter with.
// The test fills the shared memory beforehand: convert-vector-to-gpu wants every op of the function to be one it knows.
#a = affine_map<(i,j,k)->(i,k)>
#b = affine_map<(i,j,k)->(j,k)>
#c = affine_map<(i,j,k)->(i,j)>
#t = affine_map<(d0,d1)->(d1,d0)>
gpu.module @attention {
  gpu.func @contract(%as: memref<16x16xf16, #gpu.address_space<workgroup>>, %bs: memref<8x16xf16, #gpu.address_space<workgroup>>,
                  %ts: memref<16x8xf16, #gpu.address_space<workgroup>>, %C: memref<16x8xf32, 1>, %D: memref<16x8xf32, 1>)
      kernel attributes {known_block_size = array<i32: 32, 1, 1>} {
    %c0 = arith.constant 0 : index
    %z = arith.constant 0.0 : f16
    %zf = arith.constant 0.0 : f32
    %x = vector.transfer_read %as[%c0,%c0], %z {in_bounds=[true,true]} : memref<16x16xf16, #gpu.address_space<workgroup>>, vector<16x16xf16>
    %y = vector.transfer_read %bs[%c0,%c0], %z {in_bounds=[true,true]} : memref<8x16xf16, #gpu.address_space<workgroup>>, vector<8x16xf16>
    %w = vector.transfer_read %ts[%c0,%c0], %z {in_bounds=[true,true], permutation_map=#t} : memref<16x8xf16, #gpu.address_space<workgroup>>, vector<8x16xf16>
    %ac = vector.transfer_read %C[%c0,%c0], %zf {in_bounds=[true,true]} : memref<16x8xf32, 1>, vector<16x8xf32>
    %ad = vector.transfer_read %D[%c0,%c0], %zf {in_bounds=[true,true]} : memref<16x8xf32, 1>, vector<16x8xf32>
    %p = vector.contract {indexing_maps=[#a,#b,#c], iterator_types=["parallel","parallel","reduction"], kind=#vector.kind<add>} %x, %y, %ac : vector<16x16xf16>, vector<8x16xf16> into vector<16x8xf32>
    %q = vector.contract {indexing_maps=[#a,#b,#c], iterator_types=["parallel","parallel","reduction"], kind=#vector.kind<add>} %x, %w, %ad : vector<16x16xf16>, vector<8x16xf16> into vector<16x8xf32>
    vector.transfer_write %p, %C[%c0,%c0] {in_bounds=[true,true]} : vector<16x8xf32>, memref<16x8xf32, 1>
    vector.transfer_write %q, %D[%c0,%c0] {in_bounds=[true,true]} : vector<16x8xf32>, memref<16x8xf32, 1>
    gpu.return
  }
}
